"""The rules about experts resolved for a model: which modules, and how their stacks are sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from vescale_parallel._common.messages import listed, table
from vescale_parallel._experts.kinds import Kind, is_known, kind_of
from vescale_parallel._experts.moe import Experts
from vescale_parallel._experts.rules import ExpertRules
from vescale_parallel._notation.glob import first_match
from vescale_parallel._notation.layout import RuleLayout, blocks_text
from vescale_parallel._notation.rows import ParameterRow


@dataclass(frozen=True)
class ExpertsRow:
    """One module of experts.

    Attributes:
        module: its name.
        rule: the rule that names it, or "" for one that says by itself what it is.
        axes: axes of the mesh that share its experts; none: every rank holds all, and computes
            what its own rows need of them.
        kind: how it computes.
        counts: how many experts each rank of these axes holds, in their order.
    """

    module: str
    rule: str
    axes: tuple[str, ...]
    kind: Kind
    counts: tuple[int, ...]


def experts_rows(
    rules: ExpertRules, model: nn.Module, sizes: Mapping[str, int]
) -> tuple[list[ExpertsRow], list[str]]:
    """Return the modules of experts that a plan is about, and what is wrong with it."""
    rows: list[ExpertsRow] = []
    problems: list[str] = []
    for name, module in model.named_modules():
        rule = first_match(rules.globs, name) if rules.globs else None
        # Those that say what they are take part in every plan: what they say of a token is about
        # that token, so each rank computes its own rows, whether or not an axis shares the experts.
        is_said = is_known(module) or isinstance(module, Experts)
        if rule is None and not is_said:
            continue
        wanted = rules.axes if rule is None else rules.globs[rule]
        kind = kind_of(module)
        draws = [n for n, one in module.named_modules() if _draws(one)]
        if not wanted and any(True for _ in module.buffers()):
            continue  # what it writes there may be of all tokens
        if isinstance(kind, str) or draws:
            # Where the plan asks for nothing it stays as it is: gathered, and right.
            if wanted:
                problems.append(_unfit(name, rule or ", ".join(wanted), kind, draws))
            continue
        axes = tuple(axis for axis in sizes if axis in wanted and sizes[axis] > 1)
        counts = shares_of(kind.experts, [sizes[axis] for axis in axes])
        rows.append(ExpertsRow(name, rule or "", axes, kind, counts))
    # An axis alone says that the model has experts; with globs, a glob that matches nothing is told
    # elsewhere.
    if not rows and not problems and rules.axes:
        problems.append(
            f"experts '{', '.join(rules.axes)}': no module of the model says that it holds "
            "experts. Name them: experts={'*.experts': 'ep'}."
        )
    return rows, problems


def _unfit(name: str, rule: str, kind: Kind | str, draws: Sequence[str]) -> str:
    """Why a module that the plan is about cannot be one of experts, in words."""
    if isinstance(kind, str):
        return f"experts '{rule}': '{name}' is no module of experts: {kind}."
    return (
        f"experts at '{name}': {listed(draws)} inside would draw other random numbers for rows "
        "that have moved. Drop out before or behind the experts."
    )


def _draws(module: nn.Module) -> bool:
    # By name: libraries have dropouts of their own, which are no subclasses of torch's.
    return type(module).__name__.endswith("Dropout") and getattr(module, "p", 0) != 0


def shares_of(count: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return how many of `count` experts each rank of nested axes holds, as layouts shard them."""
    counts = [count]
    for size in sizes:
        # ceil(n / k) each, the last smaller, and later ones none: as `torch.chunk` divides.
        counts = [
            max(0, min(each, one - at * each))
            for one in counts
            for each in [-(-one // size)]
            for at in range(size)
        ]
    return tuple(counts)


def stacks_of(rows: Sequence[ExpertsRow]) -> dict[str, ExpertsRow]:
    """Return the row of each stack of experts, by the name of the parameter."""
    return {
        f"{row.module}.{name}" if row.module else name: row
        for row in rows
        for name in row.kind.stacks
    }


def stack_layout(
    row: ExpertsRow, name: str, shape: Sequence[int], layout: RuleLayout, sizes: Mapping[str, int]
) -> RuleLayout:
    """Return how a stack is sharded: by its experts, and where a rule shards its products too.

    Args:
        row: of the module.
        name: of the parameter, in the module.
        shape: of the parameter.
        layout: what the rules about parameters say of it.
        sizes: of the mesh.
    """
    dims = {axis: layout.dim_of(axis, len(shape)) for axis in layout.axes}
    blocks = dict(layout.blocks)
    dims |= dict.fromkeys(row.axes, 0)
    outputs = dict(row.kind.up).get(name)
    for axis, dim in list(dims.items()):
        # Gate and up lie one behind the other: a shard of both has a part of each.
        fits = outputs is not None and shape[outputs] % sum(row.kind.blocks) == 0
        if fits and dim == outputs and axis in sizes and len(row.kind.blocks) > 1:
            blocks[axis] = row.kind.blocks
    text = ", ".join(
        f"{axis}:{'full' if dim is None else dim}{blocks_text(blocks.get(axis, (1,)))}"
        for axis, dim in dims.items()
    )
    kept = tuple((axis, one) for axis, one in blocks.items() if dims.get(axis) is not None)
    return RuleLayout(text or str(layout), tuple(dims.items()), layout.everywhere, kept)


def axes_within(
    row: ExpertsRow, stacks: Mapping[str, ParameterRow], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the axes over which the products of each expert are sharded as columns and rows.

    All stacks have to agree; over other axes that shard a stack it is gathered where it is used.

    Args:
        row: of the module.
        stacks: of its parameters, by their names in the module.
        sizes: of the mesh.
    """
    if not row.kind.down:
        return ()
    return tuple(
        axis
        for axis, size in sizes.items()
        if axis not in row.axes and size > 1 and _is_within(row.kind, stacks, axis, size)
    )


def _is_within(kind: Kind, stacks: Mapping[str, ParameterRow], axis: str, size: int) -> bool:
    def dim(name: str) -> int | None:
        return stacks[name].layout.dim_of(axis, len(stacks[name].global_shape))

    leads = all(dim(name) == outputs for name, outputs in kind.up)
    alike = all(stacks[name].layout.blocks_of(axis) == kind.blocks for name, _ in kind.up)
    back = all(dim(name) == inputs for name, inputs in kind.down)
    if not (leads and alike and back and all(dim(name) is None for name in kind.behind)):
        return False
    # Pairs that lie side by side stay together where every shard has as many; and kernels of
    # grouped products refuse rows that begin anywhere, which those of a shard may do.
    name, inputs = kind.down[0]
    extent = stacks[name].global_shape[inputs]
    even = not kind.pairs or extent % size == 0
    bytes_ = [count * stacks[name].compute.itemsize for count in shares_of(extent, [size])]
    return even and all(one % kind.alignment == 0 for one in bytes_)


def experts_table(rows: Sequence[ExpertsRow]) -> str:
    """Return the table of modules of experts that `explain` prints."""
    cells = [
        (
            row.module,
            row.kind.experts,
            ", ".join(row.axes) or "(every rank)",
            max(row.counts)
            if min(row.counts) == max(row.counts)
            else f"{min(row.counts)} to {max(row.counts)}",
        )
        for row in rows
    ]
    return table(["module", "experts", "over", "of a rank"], cells)
