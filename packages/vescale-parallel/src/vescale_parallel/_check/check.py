"""Resolve a plan's rules against a model and mesh sizes: a `Report`, or every problem.

All problems are collected before anything is raised: a plan for a new model is wrong in several
places at once, and one error per run would take one run each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._check.gathers import gather_rows
from vescale_parallel._check.parsed_rules import Rules
from vescale_parallel._check.report import Report
from vescale_parallel._checkpoint.resolve import RegionRow, regions_of
from vescale_parallel._common.mesh import AXES, mesh_sizes
from vescale_parallel._common.messages import count, did_you_mean, listed
from vescale_parallel._errors import PlanError
from vescale_parallel._experts.resolve import ExpertsRow, experts_rows, stack_layout, stacks_of
from vescale_parallel._local_rows.resolve import local_rows_problems, named_modules
from vescale_parallel._notation.arguments import unknown_arguments
from vescale_parallel._notation.glob import (
    CATCH_ALL,
    dead_alternatives,
    first_match,
    matches,
    named_matches,
    nearest_names,
)
from vescale_parallel._notation.layout import Chosen, RuleLayout, local_shape, some_rank_is_empty
from vescale_parallel._notation.rows import BoundaryRow, ParameterRow
from vescale_parallel._pipeline.plan.rules import AXIS
from vescale_parallel._pipeline.plan.split import Split, split_model
from vescale_parallel._static.units import captured_units
from vescale_parallel._zero import host
from vescale_parallel._zero.dtypes import cast_buffers_of, dtype_notes, with_dtypes
from vescale_parallel._zero.offload import offload_notes, wanted_offload, with_offload
from vescale_parallel._zero.reduce_ahead import reduce_ahead_of
from vescale_parallel._zero.resolve import buffers_of, levels_of, notes_of, with_units


def check_rules(
    rules: Rules,
    model: nn.Module,
    mesh_shape: Mapping[str, int] | DeviceMesh,
    inputs: Any = None,
) -> Report:
    """Return the rules resolved, or one `PlanError` that lists every problem."""
    sizes = mesh_sizes(mesh_shape)
    problems = _unknown_axes(rules, list(sizes))
    experts, expert_problems = _experts(rules, model, sizes)
    parameters, parameter_problems = _parameter_rows(rules, model, sizes, experts)
    boundaries, boundary_problems = _boundary_rows(rules, model)
    problems += expert_problems + parameter_problems + boundary_problems
    host_only = isinstance(mesh_shape, DeviceMesh) and host.is_host(mesh_shape.device_type)
    offload, offload_problems = wanted_offload(rules.zero, parameters, host_only=host_only)
    parameters, zero_problems = _with_levels(
        rules, model, parameters, sizes, stacks_of(experts), offload
    )
    experts, unit_problems = _gathered_at_once(experts, parameters)
    zero_problems += offload_problems + unit_problems
    local, local_problems = _local_rows(rules, model, experts, parameters)
    regions, region_problems = _regions(rules, model)
    split, split_problems = _split(rules, model, sizes, inputs)
    # Before problems are raised: stages may have some of their own, and all are told at once.
    if split is not None:
        split_problems += _twice_over(rules, parameters)
        split, parameters = _with_stages(rules, model, split, parameters, sizes)
    problems += zero_problems + local_problems + region_problems + split_problems
    if problems:
        head = f"the plan does not fit {type(model).__name__}: {count(len(problems), 'problem')}"
        raise PlanError("\n  - ".join([head, *problems]))
    buffers = (
        buffers_of(rules.zero, model, parameters, sizes)
        if split is None
        else tuple(one for of_rank in split.buffers for one in of_rank)
    )
    return Report(
        mesh=tuple(sizes.items()),
        parameters=tuple(parameters),
        boundaries=tuple(boundaries),
        batch=rules.batch,
        # `parameters()` yields a shared one once, as the rows do.
        total_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        notes=tuple(
            _notes(rules, parameters, sizes)
            + notes_of(parameters, rules.zero)
            + dtype_notes(parameters, rules.zero)
            + offload_notes(rules.zero, offload, parameters, sizes, host_only=host_only)
        ),
        buffers=buffers,
        over=rules.zero.over,
        reduce_ahead=reduce_ahead_of(rules.zero.reduce_ahead, buffers)
        if buffers and split is None
        else None,
        prefetch=1 if rules.zero.prefetch is None else rules.zero.prefetch,
        cast_buffers=cast_buffers_of(rules.zero, model),
        captured=tuple(captured_units(model)),
        gathers=gather_rows(model),
        regions=tuple(regions),
        budget=rules.checkpoint.budget,
        split=split,
        microbatches=rules.pipeline.microbatches,
        experts=tuple(experts),
        local_rows=tuple(local),
    )


def _with_levels(
    rules: Rules,
    model: nn.Module,
    rows: list[ParameterRow],
    sizes: Mapping[str, int],
    stacks: Mapping[str, ExpertsRow],
    offload: Mapping[str, str],
) -> tuple[list[ParameterRow], list[str]]:
    """Return the rows with their ZeRO levels, and what is wrong with the rules about those."""
    levels, problems = levels_of(rules.zero, rows, sizes, stacks, offload)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if rules.zero.is_used:
        problems += _dead_rules("parameter", rules.zero.levels, names)
        problems += _dead_rules("parameter", dict.fromkeys(rules.zero.owned), names)
        problems += _dead_rules("parameter", rules.zero.offload, names)
        units = dict.fromkeys(rules.zero.units, None)
        problems += _dead_rules("module", units, [name for name, _ in model.named_modules()])
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    problems += _dead_rules("parameter or buffer", rules.zero.precision, [*names, *buffers])
    levelled = [replace(row, zero=levels.get(row.name, 0)) for row in rows]
    cast, dtype_problems = with_dtypes(rules.zero, levelled)
    moved, offload_problems = with_offload(offload, cast)
    return with_units(rules.zero, model, moved), problems + dtype_problems + offload_problems


def _regions(rules: Rules, model: nn.Module) -> tuple[list[RegionRow], list[str]]:
    names = [name for name, _ in model.named_modules() if name]
    dead = _dead_rules("module", rules.checkpoint.globs, names)
    regions, problems = regions_of(rules.checkpoint, model)
    return regions, dead or problems


def _experts(
    rules: Rules, model: nn.Module, sizes: Mapping[str, int]
) -> tuple[list[ExpertsRow], list[str]]:
    names = [name for name, _ in model.named_modules() if name]
    dead = _dead_rules("module", rules.experts.globs, names)
    rows, problems = experts_rows(rules.experts, model, sizes)
    return rows, dead or problems


def _gathered_at_once(
    experts: Sequence[ExpertsRow], rows: Sequence[ParameterRow]
) -> tuple[list[ExpertsRow], list[str]]:
    """Experts compute with all of their parameters at once, which one unit has to gather.

    Returns:
        The modules of which that is true, and what is wrong with others that the plan asks for.
    """
    kept, problems = [], []
    for one in experts:
        inside = f"{one.module}." if one.module else ""
        found = dict.fromkeys(r.unit for r in rows if r.zero and r.unit and r.unit != one.module)
        within = [unit for unit in found if unit.startswith(inside)]
        if not within:
            kept.append(one)
        elif one.rule or one.axes:
            problems.append(
                f"experts at '{one.module}' with zero: {listed(within)} inside would be gathered "
                f"alone. Name units around the experts: Zero(units={(one.module,)!r})."
            )
    return kept, problems


def _local_rows(
    rules: Rules,
    model: nn.Module,
    experts: Sequence[ExpertsRow],
    parameters: Sequence[ParameterRow],
) -> tuple[list[str], list[str]]:
    """Return modules that compute on each rank's own rows, and what is wrong with them."""
    names = [name for name, _ in model.named_modules() if name]
    dead = _dead_rules("module", dict.fromkeys(rules.local_rows), names)
    found, _ = named_modules(rules.local_rows, model)
    shared = [one.module for one in experts if one.axes]
    return found, dead or local_rows_problems(found, model, shared, parameters)


def _split(
    rules: Rules, model: nn.Module, sizes: Mapping[str, int], inputs: Any
) -> tuple[Split | None, list[str]]:
    """Return the stages, if there are any, and what is wrong with them."""
    ranks = sizes.get(AXIS, 1)
    if ranks == 1 or not rules.pipeline.is_used:
        return None, []
    problems = []
    others = [rules.batch, *rules.parameters.values(), *rules.activations.values()]
    if any(AXIS in one.axes for one in others if one is not None):
        problems.append(f"pipeline: its stages lie over '{AXIS}', so no layout can name that axis.")
    if rules.checkpoint.budget is not None:
        problems.append("pipeline with a budget of activations: name blocks in checkpoint=.")
    try:
        return split_model(rules.pipeline, model, ranks, inputs), problems
    except PlanError as error:
        return None, [*problems, str(error)]


def _twice_over(rules: Rules, rows: Sequence[ParameterRow]) -> list[str]:
    """Stages and the shards of `zero` lie over their axes as one, which no layout can name."""
    over = rules.zero.over
    if not any(row.zero for row in rows):
        return []
    found = [r.name for r in rows if r.layout.dim_of(over, len(r.global_shape)) is not None]
    return [
        f"pipeline with zero over '{over}': {listed(found)} are sharded over that axis by a layout "
        "or as experts. Shard them over another axis."
    ] * bool(found)


def _with_stages(
    rules: Rules,
    model: nn.Module,
    split: Split,
    rows: list[ParameterRow],
    sizes: Mapping[str, int],
) -> tuple[Split, list[ParameterRow]]:
    """Return stages and rows that agree: which parameters each rank shards with its stage."""
    # An empty list for each rank: who asks for the buffers of a rank need not know whether there
    # are any.
    if not any(row.zero for row in rows):
        return replace(split, buffers=((),) * sizes[AXIS]), rows
    owners = dict(split.owners)
    for row in rows:
        # Shards lie over the axes of stages and of `zero` as one, along which a parameter is either
        # sharded or everywhere.
        if not row.zero:
            owners |= dict.fromkeys(row.names, None)
    # What every stage holds is in no buffer, so it stays on the device.
    kept = [
        row if owners[row.name] is not None else replace(row, zero=0, offload="") for row in rows
    ]
    buffers = tuple(
        buffers_of(rules.zero, model, [r for r in kept if owners[r.name] == rank], sizes)
        for rank in range(sizes[AXIS])
    )
    return replace(split, owners=owners, buffers=buffers), kept


def _unknown_axes(rules: Rules, mesh_axes: list[str]) -> list[str]:
    # An axis that the plan is written for may be missing from the mesh at hand: one plan serves any
    # mesh. A name that is in neither list can only be a typing error.
    written_for = list(dict.fromkeys([*AXES, *rules.axes]))
    known = list(dict.fromkeys([*mesh_axes, *written_for]))
    return [
        f"{rule}: no axis '{axis}'.{did_you_mean(axis, known)} The mesh has {listed(mesh_axes)}, "
        f"the plan is written for {listed(written_for)}."
        for rule, axes in rules.axes_by_rule().items()
        for axis in axes
        if axis not in known
    ]


def _dead_rules(what: str, rules: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """Return rules that never apply: they match no name, or earlier rules take all they match."""
    problems = []
    # Once for each name: models have thousands of them, and plans dozens of rules.
    first = {name: first_match(rules, name) for name in names}
    for glob in rules:
        # Each alternative on its own: `{gate,upp}` would else hide its typing error behind `gate`.
        for alternative in dead_alternatives(glob, names):
            of = f" (of '{glob}')" if alternative != glob else ""
            near = nearest_names(alternative, names) or list(names)[:3]
            problems.append(
                f"rule '{alternative}'{of} matches no {what}. Nearest names: {listed(near)}."
            )
        mine = [name for name in names if matches(glob, name)]
        # The catch-all is there for whatever is left, which may be nothing.
        if mine and glob != CATCH_ALL and all(first[name] != glob for name in mine):
            takers = dict.fromkeys(str(first[name]) for name in mine)
            problems.append(
                f"rule '{glob}' never applies: earlier rules ({listed(takers)}) take every {what} "
                "that it matches. Put it before them, or remove it."
            )
    return problems


def _parameter_rows(
    rules: Rules, model: nn.Module, sizes: Mapping[str, int], experts: Sequence[ExpertsRow]
) -> tuple[list[ParameterRow], list[str]]:
    # All names of shared parameters: a rule may be written for any of them.
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    problems = _dead_rules("parameter", rules.parameters, names)
    uncovered = [name for name in names if first_match(rules.parameters, name) is None]
    if uncovered:
        problems.append(
            f"no rule covers {count(len(uncovered), 'parameter')}: {listed(uncovered)}. Add rules, "
            "or end with '*': 'replicate'."
        )
    stacks = stacks_of(experts)
    rows = []
    for shared, parameter in _names_by_parameter(model).items():
        placed = _place(rules, shared, parameter, sizes, stacks)
        if isinstance(placed, str):
            problems.append(placed)
        elif placed is not None:
            rows.append(placed)
    return rows, problems


def _place(
    rules: Rules,
    names: tuple[str, ...],
    parameter: torch.Tensor,
    sizes: Mapping[str, int],
    stacks: Mapping[str, ExpertsRow],
) -> ParameterRow | str | None:
    """Return the row of one parameter, what is wrong with it, or None where no rule covers it."""
    # Every name of a shared parameter has a rule of its own, and they may contradict each other.
    globs = list(named_matches(rules.parameters, names).values())
    layouts = {glob: rules.parameters[glob] for glob in globs}
    if len({*layouts.values()}) > 1:
        told = listed([f"{glob}: {layout}" for glob, layout in layouts.items()])
        return (
            f"{listed(names)} are one parameter, and its rules give it different layouts ({told}). "
            "Give its names one layout."
        )
    if not layouts:
        return None
    layout = layouts[globs[0]]
    if layout.least_ndim > parameter.ndim:
        return (
            f"parameter '{names[0]}' has shape {tuple(parameter.shape)}, and rule '{globs[0]}' "
            f"shards a dim that it lacks ('{layout}'). Put a rule for it before that one."
        )
    for name in names:
        if name in stacks:
            own = name.rpartition(".")[2]
            # Experts lie over their axes whatever the rule says, which may shard the other dims.
            layout = stack_layout(stacks[name], own, parameter.shape, layout, sizes)
    for axis, blocks in layout.blocks:
        dim = layout.dim_of(axis, parameter.ndim)
        if dim is not None and parameter.shape[dim] % sum(blocks):
            return (
                f"parameter '{names[0]}' has shape {tuple(parameter.shape)}, and rule '{globs[0]}' "
                f"shards a dim of {sum(blocks)} equal blocks ('{layout}'), which "
                f"{parameter.shape[dim]} is not. Write the dim alone, or the right number of "
                "blocks."
            )
    return _parameter_row(names, parameter, globs[0], layout, sizes)


def _names_by_parameter(model: nn.Module) -> dict[tuple[str, ...], nn.Parameter]:
    """Return every parameter once, under all the names it has."""
    # By identity: tensors compare by value, and `named_parameters` would leave out the other names.
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    return {tuple(names[key]): parameter for key, parameter in parameters.items()}


def _parameter_row(
    names: tuple[str, ...],
    parameter: torch.Tensor,
    rule: str,
    layout: RuleLayout,
    sizes: Mapping[str, int],
) -> ParameterRow:
    # The ranks at coordinate 0 hold the most; what others lack shows as `uneven`.
    shard = local_shape(layout, parameter.shape, tuple(sizes.items()))
    sharding = [n for axis, n in sizes.items() if layout.dim_of(axis, parameter.ndim) is not None]
    numel = torch.Size(shard).numel()
    return ParameterRow(
        names=names,
        rule=rule,
        layout=layout,
        global_shape=tuple(parameter.shape),
        local_shape=shard,
        local_bytes=numel * parameter.element_size(),
        uneven=numel * math.prod(sharding) != parameter.numel(),
        dtype=parameter.dtype,
        compute=parameter.dtype,
        reduce=parameter.dtype,
    )


def _boundary_rows(rules: Rules, model: nn.Module) -> tuple[list[BoundaryRow], list[str]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    problems = _dead_rules("module", rules.activations, list(modules))
    # By object: the same module may be reached under several names.
    rows: dict[int, BoundaryRow] = {}
    for name, module in modules.items():
        rule = first_match(rules.activations, name)
        if rule is None:
            continue
        row = BoundaryRow(name, rule, rules.activations[rule])
        if isinstance(row.boundary.inputs, Chosen):
            wrong = unknown_arguments(module, row.boundary.inputs)
            problems += [f"activation rule '{rule}' at '{name}': {one}" for one in wrong]
        # One module object runs one set of hooks, under however many names it can be reached.
        earlier = rows.setdefault(id(module), row)
        if earlier.boundary != row.boundary:
            problems.append(
                f"'{earlier.module}' and '{name}' are one module, and rules '{earlier.rule}' and "
                f"'{rule}' treat it differently. Give its names one rule."
            )
    return list(rows.values()), problems


def _notes(rules: Rules, rows: Sequence[ParameterRow], sizes: Mapping[str, int]) -> list[str]:
    named = {axis for axes in rules.axes_by_rule().values() for axis in axes}
    absent = sorted(named - set(sizes))
    # Legal, as one rank of two that do the same is right; but hardly what was meant.
    idle = [axis for axis, size in sizes.items() if size > 1 and axis not in named]
    notes = []
    if absent:
        notes.append(f"the mesh has no axis {listed(absent)}; what the plan says of it is left out")
    if idle:
        notes.append(f"the plan does not use mesh axis {listed(idle)}: its ranks repeat each other")
    in_order = tuple(sizes.items())
    thin = [r.name for r in rows if some_rank_is_empty(r.layout, r.global_shape, in_order)]
    # Right all the same; but views by heads, say, may have to send what even shards would not.
    uneven = [r.name for r in rows if r.uneven and r.name not in thin]
    if uneven:
        notes.append(f"dims that do not divide, some ranks hold less of {listed(uneven)}")
    if thin:
        notes.append(f"too few rows for every rank, some hold nothing of {listed(thin)}")
    return notes
