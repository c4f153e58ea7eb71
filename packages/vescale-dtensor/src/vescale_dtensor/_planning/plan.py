"""Makes the plan of a call from its rule's strategy. Plans are immutable and printable.

`build` takes, for each mesh axis, the candidate that `select.choose` finds cheapest, and assembles
the layouts of operands and outputs from the choices. Only global facts enter (layouts, shapes,
dtypes), so every rank makes the same plan without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import MeshError, RuleError
from vescale_dtensor._layout.layout import Layout, Order, Shape, bits
from vescale_dtensor._layout.mesh import describe
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Replicate, Shard
from vescale_dtensor._layout.spellings import axes_between
from vescale_dtensor._planning import whole_sums
from vescale_dtensor._planning.memory_order import result_orders
from vescale_dtensor._planning.op_call import OpCall, Reads, is_strided, memory_order
from vescale_dtensor._planning.select import (
    AxisChoice,
    candidates_of_flat_shards,
    choose,
    relative_sizes,
)
from vescale_dtensor._planning.strategy import AxisStrategy, Signature, Strategy
from vescale_dtensor._planning.widened_sums import without_widened_sums
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.schemas import in_signature_order, refuses_flags


@dataclass(frozen=True)
class Rule:
    """How to plan calls of a family of functions.

    Attributes:
        name: of the family, for messages.
        strategy: returns the strategy for a call; None if the rule does not hold for it.
        reads: what `strategy` reads of the call besides layouts: flags of `Reads`.
        writes: index of the operand that is changed in place and returned.
        views: whether the output aliases operand 0 on one device.
        flag: position of an argument `inplace` that makes the function write to operand 0.
        shape_class: for rules that read shapes. Returns a key that is equal for calls whose plans
            differ in the output's shape alone, and that shape; None for a call that is in no such
            class.
    """

    name: str
    strategy: Callable[[OpCall], Strategy | None]
    reads: int = Reads.NUMBERS
    writes: int | None = None
    views: bool = False
    flag: int | None = None
    shape_class: Callable[[OpCall], tuple[Hashable, Shape] | None] | None = None

    @cached_property
    def writing(self) -> Rule:
        """The same family with the `inplace` flag set."""
        return replace(self, name=f"{self.name} in place", writes=0, flag=None)


@dataclass(frozen=True)
class OperandUse:
    """How an op uses one operand.

    Attributes:
        layout: what the operand is redistributed to.
        varying: mask of the axes on which the operand is replicated and the op varies.
    """

    layout: Layout
    varying: int


# Frozen: plans are shared by all calls of one key, and by threads.
@dataclass(frozen=True)
class OpPlan:
    """How to run one kind of call.

    Attributes:
        rule: the rule it came from.
        uses: one per operand.
        outputs: layout of each output. A single one serves any number of outputs.
        strategy: says how output shapes are found, and what is called on the local tensors.
        redistributes: whether operands have to be sent. The cheapest way to do so depends on their
            sizes, so such a plan only serves calls whose sizes have the same ratios.
    """

    rule: Rule
    uses: tuple[OperandUse, ...]
    outputs: tuple[Layout, ...]
    strategy: Strategy
    redistributes: bool

    def with_shape(self, shape: Shape) -> OpPlan:
        """The same plan with another output shape, of a rule that states shapes."""
        return replace(self, strategy=replace(self.strategy, shapes=(shape,)))

    def __str__(self) -> str:
        inputs = ", ".join(str(list(use.layout.placements)) for use in self.uses)
        outputs = ", ".join(str(list(layout.placements)) for layout in self.outputs)
        moving = ", moving operands" if self.redistributes else ""
        return f"{self.rule.name}: {inputs} -> {outputs}{moving}"


class SeveralSpellingsError(Exception):
    """Operands are on several spellings of one mesh, and a plan is of one: see `one_mesh`."""


def require_one_spelling(call: OpCall) -> None:
    """Refuse to plan a call whose operands are on several spellings of one mesh.

    Raises:
        SeveralSpellingsError: they are.
        MeshError: as `mesh_of`.
    """
    mesh = mesh_of(call)
    for operand in call.operands:
        if isinstance(operand, DTensor):
            found = operand._spec.layout.mesh
            if found is not mesh and found != mesh:
                raise SeveralSpellingsError


def mesh_of(call: OpCall) -> DeviceMesh:
    """The one mesh of a call's DTensors, as the first of them spells it.

    Raises:
        MeshError: they are on two meshes, or there are none, or this rank is outside of the mesh:
            it holds nothing to compute on.
    """
    mesh: DeviceMesh | None = None
    for operand in call.operands:
        if isinstance(operand, DTensor):
            found = operand._spec.layout.mesh
            if not operand._spec.layout.inside:
                raise MeshError(
                    f"{function_name(call.func)}: this rank is not part of {describe(found)}, and "
                    "holds nothing of its tensors. Leave the call out here: "
                    "`if mesh.get_coordinate() is not None:`"
                )
            if mesh is None:
                mesh = found
            elif found is not mesh and axes_between(found, mesh) is None:
                raise MeshError(
                    f"{function_name(call.func)}: operands on {describe(mesh)} and on "
                    f"{describe(found)}; bring them to one mesh first"
                )
    if mesh is None:
        raise MeshError(f"{function_name(call.func)}: no DTensor among the operands")
    return mesh


def function_name(func: Any) -> str:
    """A readable name of a function, the same on each rank: `torch.matmul`, `Tensor.add_`."""
    if str(getattr(func, "__module__", "")).startswith("torch._ops."):
        return f"torch.ops.{func}"
    if isinstance(func, partial):
        return function_name(func.func)
    # An object that is called goes by its class: its text may have an address, or a rank's values.
    names = [getattr(func, each, None) for each in ("__qualname__", "__name__")]
    name = str(names[0] or names[1] or type(func).__qualname__)
    owner, _, short = name.rpartition(".")
    return f"{_OWNERS.get(owner, owner)}.{short}" if owner else name


# torch's internal owner of a function -> the name under which users find it.
_OWNERS = {
    "_VariableFunctionsClass": "torch",
    "TensorBase": "Tensor",
    "_VariableFunctions": "torch",
}


def layouts_of(call: OpCall, mesh: DeviceMesh) -> list[Layout]:
    """The layout of each operand; a plain tensor counts as replicated."""
    replicated = Layout.of(mesh, [Replicate()] * mesh.ndim)
    return [
        operand._spec.layout
        if isinstance(operand, DTensor)
        else replicated.with_order(memory_order(operand))
        for operand in call.operands
    ]


def build(call: OpCall, rule: Rule, *, moves_target: bool = False) -> OpPlan | None:
    """The plan for a call; None if the rule does not hold and the fallback has to serve.

    Args:
        call: the parsed call.
        rule: the function's rule.
        moves_target: whether the plan may redistribute the operand that is written in place: it is
            for a copy then (see `_dispatch.mutate`).

    Raises:
        RuleError: the rule returned something that no plan can be made from.
        MeshError: the operands are on two meshes.
    """
    if not all(isinstance(operand, DTensor) or is_strided(operand) for operand in call.operands):
        return None  # no rule knows sparse, nested or quantized operands
    if not in_signature_order(call.func, call.args, call.kwargs):
        return None  # rules know operands by their place
    if refuses_flags(call.func, call.args, call.kwargs):
        return None  # in the fallback torch says so, on every rank
    strategy = _checked(rule.strategy(call), call, rule)
    # Before the fallback gets it: replicating what has no dims costs next to nothing.
    if strategy is None and _has_no_dims(call, rule):
        strategy = _replicated(len(call.operands))
    if strategy is None or not strategy.fits(call.shapes()):
        # Shapes that do not fit together: in the fallback torch raises the error for them, with
        # global shapes and on every rank.
        return None
    mesh = mesh_of(call)
    actual = layouts_of(call, mesh)
    strategy = without_widened_sums(strategy, call, actual, rule.writes)
    itemsizes = [_itemsize(operand) for operand in call.operands]
    sizes = relative_sizes(call.size_ratios(), itemsizes)
    whole = whole_sums.of(mesh)
    flat_candidates = candidates_of_flat_shards(strategy, [layout.placements for layout in actual])
    # Each axis chooses by itself first, which is the cheapest. If the shardings chosen do not fit
    # together, choose again, each axis among what fits the choices of the axes before it.
    for heeding in (False, True):
        choices: list[AxisChoice] = []
        for axis, count in enumerate(mesh.shape):
            placements = [layout.placements[axis] for layout in actual]
            candidates = strategy.candidates_at(axis) + (
                flat_candidates[axis] if flat_candidates else ()
            )
            fits = partial(_fits_behind, choices, actual) if heeding else None
            if axis in whole:
                fits = partial(_sums_whole, placements, fits)
            choice = choose(candidates, placements, sizes, count, rule.writes, moves_target, fits)
            if choice is None:
                return None
            choices.append(choice)
        plan = _assembled(call, rule, strategy, actual, choices)
        if _shards_fit(plan, actual):
            return plan
    return None


def _checked(strategy: Any, call: OpCall, rule: Rule) -> Strategy | None:
    """The strategy that a rule returned, after checks that it suits the call.

    Users write rules too, and a mistake would otherwise fail far from its cause.

    Raises:
        RuleError: no plan can be made from it.
    """
    if strategy is None:
        return None
    if not isinstance(strategy, Strategy):
        signature = isinstance(strategy, Signature)
        found = "a Signature: return its .strategy()" if signature else repr(strategy)
        raise _wrong(call, rule, f"expected a Strategy or None, found {found}")
    # Without it, there might be no candidate for some layout, and no plan.
    first = strategy.candidates[0] if strategy.candidates else None
    if first is None or not all(isinstance(p, Replicate) for p in first.inputs + first.outputs):
        raise _wrong(call, rule, "the first candidate has to be replicated: it is always right")
    counts = {len(each.inputs) for each in strategy.candidates}
    counts |= {len(strategy.letters)} if strategy.letters else set()
    expected = len(call.operands)
    if counts != {expected}:
        stated = ", ".join(str(count) for count in sorted(counts - {expected}))
        said = f"placements or letters are for {stated} operands, but the call has {expected}"
        raise _wrong(call, rule, said)
    if len({len(each.outputs) for each in strategy.candidates}) > 1:
        raise _wrong(call, rule, "candidates differ in their number of outputs")
    return strategy


def _wrong(call: OpCall, rule: Rule, problem: str) -> RuleError:
    """The error of a rule, with its name and the function's."""
    return RuleError(f"rule {rule.name!r} of {function_name(call.func)}: {problem}")


def _itemsize(operand: Tensor) -> int:
    # From the spec: `operand.element_size()` would itself be dispatched.
    if isinstance(operand, DTensor):
        dtype: torch.dtype = operand._spec.tensor_meta.dtype
        return dtype.itemsize
    return operand.element_size()


def _has_no_dims(call: OpCall, rule: Rule) -> bool:
    """Whether no operand is worth sharding: a 0-dim tensor, with at most lists of indices."""
    return not call.operands[0].ndim and all(operand.ndim <= 1 for operand in call.operands)


@lru_cache(maxsize=64)
def _replicated(operands: int) -> Strategy:
    """The strategy that replicates all operands and results, for any number and shape of results.

    Unlike the fallback it logs nothing.
    """
    replicated: tuple[Placement, ...] = (Replicate(),)
    return Strategy((AxisStrategy(replicated * operands, replicated),), data_dependent_shape=True)


def _shards_fit(plan: OpPlan, actual: list[Layout]) -> bool:
    """Whether the shardings that the axes chose go together, for every operand; see `_fits`."""
    pairs = zip(plan.uses, actual, strict=True)
    return all(_fits(use.layout.placements, layout.placements) for use, layout in pairs)


def _fits_behind(choices: list[AxisChoice], actual: list[Layout], candidate: AxisStrategy) -> bool:
    """Whether one more axis's candidate goes with the choices of the axes before it."""
    candidates = [*(choice.candidate for choice in choices), candidate]
    return all(
        _fits(tuple([r.inputs[i] for r in candidates]), layout.placements[: len(candidates)])
        for i, layout in enumerate(actual)
    )


def _sums_whole(
    actual: list[Placement], fits: Callable[[AxisStrategy], bool] | None, candidate: AxisStrategy
) -> bool:
    """Whether a candidate sums no ragged shards, and fits otherwise."""
    summed = whole_sums.sums_ragged_shards(actual, candidate.inputs, candidate.outputs)
    return not summed and (fits is None or fits(candidate))


def _fits(wanted: tuple[Placement, ...], actual: tuple[Placement, ...]) -> bool:
    """Whether an operand can be redistributed from `actual` to `wanted`.

    A dim can be sharded by several axes only if all use `Shard`: interleaved and ragged shards
    depend on the extent that they find. What an operand already has is always possible.
    """
    if wanted == actual:
        return True
    shards = [p for p in wanted if isinstance(p, Sharded)]
    dims = [dim for shard in shards for dim in shard.cut_dims()]
    asking = {dim for shard in shards if not isinstance(shard, Shard) for dim in shard.cut_dims()}
    return all(dims.count(d) <= 1 for d in asking)


def _assembled(
    call: OpCall, rule: Rule, strategy: Strategy, actual: list[Layout], choices: list[AxisChoice]
) -> OpPlan:
    """The plan for one choice per mesh axis."""
    candidates = [choice.candidate for choice in choices]
    mask = bits([axis for axis, candidate in enumerate(candidates) if _varies(candidate)])
    uses = []
    for index, layout in enumerate(actual):
        wanted = layout.with_placements([candidate.inputs[index] for candidate in candidates])
        # Only replicated operands have two kinds of use; a sharded one's cotangent is sharded.
        uses.append(OperandUse(wanted, mask & wanted.replicated))
    outputs = _output_layouts(call, strategy, actual, candidates)
    # Slicing a replicated operand sends nothing, so it does not make a plan depend on sizes.
    redistributes = any(choice.bytes > 0 for choice in choices)
    return OpPlan(rule, tuple(uses), outputs, strategy, redistributes)


def _varies(candidate: AxisStrategy) -> bool:
    """Whether the op varies on the axis: ranks compute different things, not the same twice."""
    return not set(map(type, candidate.inputs + candidate.outputs)) <= {Replicate}


def _output_layouts(
    call: OpCall, strategy: Strategy, actual: list[Layout], candidates: Sequence[AxisStrategy]
) -> tuple[Layout, ...]:
    """The layout of each output, from one candidate per mesh axis."""
    # The first operand gives the mesh; placements and memory order are replaced.
    count = len(candidates[0].outputs)
    orders = result_orders(call, strategy, count)
    placements = [tuple([candidate.outputs[i] for candidate in candidates]) for i in range(count)]
    return tuple([_layout(actual[0], p, o) for p, o in zip(placements, orders, strict=True)])


def _layout(like: Layout, placements: tuple[Placement, ...], order: Order | None) -> Layout:
    """A layout on the mesh of another one."""
    return like.with_placements(placements).with_order(order)
