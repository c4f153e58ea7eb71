"""A model into stages: which blocks each has, and which parameters lie with them. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vescale_parallel._common.messages import count, listed, table
from vescale_parallel._errors import PlanError
from vescale_parallel._notation.glob import matches, nearest_names
from vescale_parallel._pipeline.plan.order import Use, order_of_use
from vescale_parallel._pipeline.plan.rules import PipelineRules
from vescale_parallel._pipeline.plan.schedule_choice import AUTO, schedule_for
from vescale_parallel._schedules.actions import Schedule
from vescale_parallel._zero.resolve import BufferRow
from vescale_parallel._zero.units import unit_names


@dataclass(frozen=True)
class Split:
    """The stages of a model.

    Attributes:
        stages: for each stage the names of its blocks, in the order in which they run.
        ranks: for each stage the rank that has it, by its coordinate on the axis.
        stem: names of modules outside of the blocks that hold parameters, and are stood in for
            where those are not there.
        owners: for each parameter, by every name, the rank that stores it; None: every rank does.
        schedule: the actions of each rank, for a training step.
        buffers: with `zero`, the flat buffers of each rank's parameters.
        is_auto: whether another schedule for the same places may follow from what is measured.
        memory: bytes that a rank may keep then from forwards to backwards.
        is_called: whether a forward's calls say where modules around the blocks lie, and not the
            order in which these are registered.
    """

    stages: tuple[tuple[str, ...], ...]
    ranks: tuple[int, ...]
    stem: tuple[str, ...]
    owners: Mapping[str, int | None]
    schedule: Schedule
    buffers: tuple[tuple[BufferRow, ...], ...] = ()
    is_auto: bool = False
    memory: float | None = None
    is_called: bool = False

    @property
    def blocks(self) -> tuple[str, ...]:
        """All blocks in order."""
        return tuple(name for stage in self.stages for name in stage)

    def text(self) -> str:
        """The table that `explain` prints."""
        own = Counter(self.owners.values())
        rows = [
            (at, rank, f"{stage[0]} ... {stage[-1]}" if len(stage) > 1 else stage[0], len(stage))
            for at, (stage, rank) in enumerate(zip(self.stages, self.ranks, strict=True))
        ]
        schedule = f"schedule {self.schedule.name}, {self.schedule.microbatches} microbatches"
        if self.is_auto:
            schedule += " (auto: chosen again by what the second step measures)"
        shared = f"{count(own[None], 'name')} of parameters on every stage"
        known = "a forward calls them" if self.is_called else "they are registered"
        return (
            table(["stage", "rank of pp", "blocks", "how many"], rows)
            + f"\n{schedule}, {shared}\nmodules around the blocks lie by the order in which {known}"
        )


def split_model(rules: PipelineRules, model: nn.Module, ranks: int, inputs: Any = None) -> Split:
    """Return the stages of a model.

    Args:
        rules: what the plan says.
        model: on any device; only names, shapes and ties are read.
        ranks: extent of the axis.
        inputs: what a call of the model is given, see `order_of_use`.

    Raises:
        PlanError: no blocks, fewer than stages, or globs that do not divide them.
    """
    modules = dict(model.named_modules())
    registered = _blocks(rules, model, modules)
    stem = _stem(modules, registered)
    order = order_of_use(model, registered, list(stem), inputs)
    blocks = order.blocks if len(order.blocks) == len(registered) else registered
    stem |= order.uses
    schedule = schedule_for(rules.schedule, ranks, rules.microbatches, rules.chunks, len(blocks))
    places = schedule.stage_ranks
    stages = (
        _by_globs(rules, blocks, len(places))
        if rules.by_stage
        else _by_cost(model, modules, blocks, stem, len(places))
    )
    owners = _owners(rules, model, stages, places, stem)
    return Split(
        stages,
        places,
        tuple(stem),
        owners,
        schedule,
        is_auto=rules.schedule == AUTO,
        memory=rules.memory,
        is_called=bool(order.blocks),
    )


def _blocks(rules: PipelineRules, model: nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    names = [name for name in modules if name]
    if rules.stages:
        dead = [g for g in rules.stages if not any(matches(g, name) for name in names)]
        if dead:
            near = nearest_names(dead[0], names) or names[:3]
            raise PlanError(
                f"pipeline stages: '{dead[0]}' matches no module. Nearest names: {listed(near)}."
            )
        found = [name for name in names if any(matches(g, name) for g in rules.stages)]
        chosen = set(found)
        # The outermost: `*` crosses dots, and what is within a block is not another one.
        return [one for one in found if not any(up in chosen for up in _above(one))]
    found = [name for name in unit_names(model, ()) if name]
    parents = dict.fromkeys(name.rpartition(".")[0] for name in found)
    # An encoder and a decoder are two lists, and which goes first is not in the module tree.
    if len(parents) != 1:
        raise PlanError(
            f"pipeline: {type(model).__name__} has repeated blocks in "
            f"{listed(parents) or 'no list'}; a pipeline runs along one list. Name its blocks: "
            "Pipeline(stages='blocks.*')."
        )
    return found


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _stem(modules: Mapping[str, nn.Module], blocks: Sequence[str]) -> dict[str, Use]:
    """Names of leaf modules with parameters outside of the blocks, as they are registered.

    A norm between the blocks of an encoder and those of a decoder is with the last block before it.
    """
    known = set(blocks)
    behind, found = "", dict[str, Use]()
    for name, module in modules.items():
        behind = name if name in known else behind
        inside = name in known or any(up in known for up in _above(name))
        own = any(True for _ in module.parameters(recurse=False))
        if name and own and not inside and not any(True for _ in module.children()):
            found[name] = Use((behind,))
    return found


def _by_globs(
    rules: PipelineRules, blocks: Sequence[str], stages: int
) -> tuple[tuple[str, ...], ...]:
    if len(rules.stages) != stages:
        raise PlanError(
            f"pipeline stages: {count(len(rules.stages), 'glob')} for {count(stages, 'stage')}. "
            "Give one for each stage, or one text for all blocks."
        )
    found = tuple(tuple(b for b in blocks if matches(g, b)) for g in rules.stages)
    if [name for stage in found for name in stage] != list(blocks):
        told = "; ".join(f"'{g}': {listed(s)}" for g, s in zip(rules.stages, found, strict=True))
        raise PlanError(
            "pipeline stages: each block belongs to one stage, and stages follow the order of the "
            f"model. Found {told}."
        )
    return found


def _by_cost(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    blocks: Sequence[str],
    stem: Mapping[str, Use],
    stages: int,
) -> tuple[tuple[str, ...], ...]:
    """Divide blocks so that the stage with most parameters has as few as can be.

    What is behind the blocks counts for the last stage: heads are products. Tables before them are
    looked up, which costs nothing.
    """
    if len(blocks) < stages:
        raise PlanError(
            f"pipeline: {count(len(blocks), 'block')} ({listed(blocks)}) for "
            f"{count(stages, 'stage')} leave a stage empty. Take fewer ranks on 'pp', fewer "
            "chunks, or smaller blocks."
        )
    # In place of seconds, which nobody has measured: a block multiplies each token with its
    # parameters.
    cost = [sum(p.numel() for p in modules[name].parameters()) for name in blocks]
    # By identity below: a head that is tied to another one behind the blocks counts once.
    behind = {
        n: p
        for name, use in stem.items()
        if blocks[-1] in use.behind
        for n, p in modules[name].named_parameters(prefix=name)
    }
    last = sum({id(p): p.numel() for p in behind.values()}.values())
    ends = _balanced(cost, last, stages)
    starts = [0, *ends[:-1]]
    return tuple(tuple(blocks[a:b]) for a, b in zip(starts, ends, strict=True))


def _balanced(cost: Sequence[int], last: int, stages: int) -> list[int]:
    """Where each stage ends: the largest sum is the least possible, none is empty."""
    n = len(cost)
    before = [0]
    for one in cost:
        before.append(before[-1] + one)
    # best[i]: of the blocks from i on in so many stages: the largest sum, and the stages' ends.
    # Equal sums: the earlier stages get more, as the last has the loss to do.
    best: list[tuple[int, list[int]] | None] = [
        (before[n] - before[i] + last, [n]) if i < n else None for i in range(n + 1)
    ]
    for _ in range(stages - 1):
        best = [_first_stage(before, best, i) for i in range(n + 1)]
    assert best[0] is not None
    return best[0][1]


def _first_stage(
    before: Sequence[int], rest: Sequence[tuple[int, list[int]] | None], start: int
) -> tuple[int, list[int]] | None:
    found = None
    for end in range(len(before) - 1, start, -1):
        after = rest[end]
        if after is None:
            continue
        largest = max(before[end] - before[start], after[0])
        if found is None or largest < found[0]:
            found = (largest, [end, *after[1]])
    return found


def _owners(
    rules: PipelineRules,
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    ranks: Sequence[int],
    stem: Mapping[str, Use],
) -> dict[str, int | None]:
    number = {name: i for i, stage in enumerate(stages) for name in stage}
    place: dict[str, int | None] = {name: ranks[i] for name, i in number.items()}
    place |= {name: _rank_of(use, number, ranks) for name, use in stem.items()}
    # By identity, since tied parameters have several names. One that is used on two ranks has no
    # owner: every rank stores it, and its gradients are summed over the axis.
    by_parameter: dict[int, set[int | None]] = {}
    names: dict[str, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holder = name.rpartition(".")[0]
        # From the outside: all that is within a block is the block's.
        within = next((one for one in (*_above(name), holder) if one in place), None)
        everywhere = any(matches(g, holder) or matches(g, name) for g in rules.everywhere)
        # What no module that is called by itself holds, any code may use anywhere. A scalar has
        # no dim that one rank could own.
        alone = within is None or everywhere or parameter.ndim == 0
        by_parameter.setdefault(id(parameter), set()).add(None if alone else place[within or ""])
        names[name] = id(parameter)
    one_owner = {
        key: found.pop() if len(found) == 1 else None for key, found in by_parameter.items()
    }
    return {name: one_owner[key] for name, key in names.items()}


def _rank_of(use: Use, number: Mapping[str, int], ranks: Sequence[int]) -> int | None:
    """The rank of a module outside of the blocks; None: every rank has it."""
    # What stands before the first block ("") lies with the first stage.
    used = {number.get(block, 0) for block in use.behind}
    if use.is_taken and used != {len(ranks) - 1}:
        return None
    found = {ranks[stage] for stage in used}
    return found.pop() if len(found) == 1 else None
