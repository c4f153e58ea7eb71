"""From a parsed call and its rule's strategy to a plan, immutable and printable."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import MeshError, RuleError
from vescale_dtensor._layout.layout import Layout, Order, Shape
from vescale_dtensor._layout.mesh import describe
from vescale_dtensor._layout.placements import Placement, Replicate, Shard, Sharded
from vescale_dtensor._planning.memory_order import result_orders
from vescale_dtensor._planning.op_call import OpCall, Reads, is_strided, memory_order
from vescale_dtensor._planning.select import (
    AxisChoice,
    candidates_of_flat_shards,
    choose,
    relative_sizes,
)
from vescale_dtensor._planning.strategy import AxisStrategy, Signature, Strategy
from vescale_dtensor._tensor.dtensor import DTensor


@dataclass(frozen=True)
class Rule:
    """What is known of a family of functions.

    Attributes:
        name: of the family, for messages.
        strategy: the possibilities for a call, or None where the rule does not hold.
        reads: what `strategy` reads of the call.
        writes: index of the operand that is changed in place and returned.
        views: whether the output aliases operand 0 on one device.
        flag: position of an argument `inplace` that makes the function write operand 0.
        shape_class: of rules that read shapes: what calls have in common whose plans differ in the
            shape of the output alone, and that shape; None for a call that is like no other.
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
    """What an op needs of one operand: a layout, and the axes on which it varies."""

    layout: Layout
    varying: int


@dataclass(frozen=True)
class OpPlan:
    """How to run one kind of call.

    Attributes:
        rule: the rule it came from.
        uses: per operand.
        outputs: layout of each output; one serves all if there is only one.
        strategy: where output shapes and the local call come from.
        redistributes: whether operands are redistributed. The cheapest way to do so depends on
            their sizes: it serves calls whose sizes have the same ratios.
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


def mesh_of(call: OpCall) -> DeviceMesh:
    """The one mesh of a call's DTensors.

    Raises:
        MeshError: two meshes.
    """
    mesh: DeviceMesh | None = None
    for operand in call.operands:
        if isinstance(operand, DTensor):
            found = operand._spec.layout.mesh
            if mesh is None:
                mesh = found
            elif found is not mesh and found != mesh:
                raise MeshError(
                    f"{function_name(call.func)}: operands on {describe(mesh)} and on "
                    f"{describe(found)}; bring them to one mesh first"
                )
    if mesh is None:
        raise MeshError(f"{function_name(call.func)}: no DTensor among the operands")
    return mesh


def function_name(func: Any) -> str:
    """A readable name of a torch function: `torch.matmul`, `Tensor.add_`, `linear`."""
    if str(getattr(func, "__module__", "")).startswith("torch._ops."):
        return f"torch.ops.{func}"
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or str(func)
    owner, _, short = name.rpartition(".")
    return f"{_OWNERS.get(owner, owner)}.{short}" if owner else str(name)


# What torch's C++ calls the places where users find these functions.
_OWNERS = {
    "_VariableFunctionsClass": "torch",
    "TensorBase": "Tensor",
    "_VariableFunctions": "torch",
}


def layouts_of(call: OpCall, mesh: DeviceMesh) -> list[Layout]:
    """The layout of each operand; a plain tensor counts as replicated."""
    whole = Layout.of(mesh, [Replicate()] * mesh.ndim)
    return [
        operand._spec.layout
        if isinstance(operand, DTensor)
        else whole.with_order(memory_order(operand))
        for operand in call.operands
    ]


def build(call: OpCall, rule: Rule, *, moves_target: bool = False) -> OpPlan | None:
    """The plan for a call, or None where the rule does not hold and the fallback must serve.

    With `moves_target`, what is written in place may have to lie otherwise (see `mutate`).
    """
    if not all(isinstance(operand, DTensor) or is_strided(operand) for operand in call.operands):
        return None  # a sparse operand is whole, and no rule knows it
    strategy = _checked(rule.strategy(call), call, rule)
    if strategy is None and _has_no_dims(call, rule):
        strategy = _replicated(len(call.operands))
    if strategy is None or not strategy.fits(call.shapes()):
        return None  # shapes that do not fit: torch says so, of the wholes, on every rank
    mesh = mesh_of(call)
    actual = layouts_of(call, mesh)
    itemsizes = [_itemsize(operand) for operand in call.operands]
    sizes = relative_sizes(call.size_ratios(), itemsizes)
    alike = candidates_of_flat_shards(strategy, [layout.placements for layout in actual])
    # Where cuts that axes chose by themselves do not fit, later ones heed what earlier ones chose.
    for heeding in (False, True):
        choices: list[AxisChoice] = []
        for axis, count in enumerate(mesh.shape):
            placements = [layout.placements[axis] for layout in actual]
            candidates = strategy.candidates_at(axis) + (alike[axis] if alike else ())
            fits = partial(_fits_behind, choices, actual) if heeding else None
            choice = choose(candidates, placements, sizes, count, rule.writes, moves_target, fits)
            if choice is None:
                return None
            choices.append(choice)
        plan = _assembled(call, rule, strategy, actual, choices)
        if _shards_fit(plan, actual):
            return plan
    return None


def _checked(strategy: Any, call: OpCall, rule: Rule) -> Strategy | None:
    """What a rule said of a call, if that is something that a plan can be made from.

    Raises:
        RuleError: it is not. Users write rules, too, and what follows would fail far from here.
    """
    if strategy is None:
        return None
    if not isinstance(strategy, Strategy):
        signature = isinstance(strategy, Signature)
        found = "a Signature: return its .strategy()" if signature else repr(strategy)
        raise _wrong(call, rule, f"expected a Strategy or None, found {found}")
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
    return RuleError(f"rule {rule.name!r} of {function_name(call.func)}: {problem}")


def _itemsize(operand: Tensor) -> int:
    # Asked of the spec: `operand.element_size()` would itself be dispatched.
    if isinstance(operand, DTensor):
        dtype: torch.dtype = operand._spec.tensor_meta.dtype
        return dtype.itemsize
    return operand.element_size()


def _has_no_dims(call: OpCall, rule: Rule) -> bool:
    """Whether nothing worth it could be cut: of a number, and of indices that go with it."""
    return not call.operands[0].ndim and all(operand.ndim <= 1 for operand in call.operands)


@lru_cache(maxsize=64)
def _replicated(operands: int) -> Strategy:
    """Everything is replicated, and so are the results, of whatever number and shape."""
    whole: tuple[Placement, ...] = (Replicate(),)
    return Strategy((AxisStrategy(whole * operands, whole),), data_dependent_shape=True)


def _shards_fit(plan: OpPlan, actual: list[Layout]) -> bool:
    """Whether no cut that asks for an extent meets a cut of the same dim that another brought."""
    pairs = zip(plan.uses, actual, strict=True)
    return all(_fits(use.layout.placements, layout.placements) for use, layout in pairs)


def _fits_behind(choices: list[AxisChoice], actual: list[Layout], candidate: AxisStrategy) -> bool:
    """The same of one more axis, behind those that have been chosen."""
    candidates = [*(choice.candidate for choice in choices), candidate]
    return all(
        _fits(tuple(r.inputs[i] for r in candidates), layout.placements[: len(candidates)])
        for i, layout in enumerate(actual)
    )


def _fits(wanted: tuple[Placement, ...], actual: tuple[Placement, ...]) -> bool:
    cuts = [p for p in wanted if isinstance(p, Sharded)]
    dims = [dim for cut in cuts for dim in cut.cut_dims()]
    asking = {dim for cut in cuts if not isinstance(cut, Shard) for dim in cut.cut_dims()}
    return wanted == actual or all(dims.count(d) <= 1 for d in asking)


def _assembled(
    call: OpCall, rule: Rule, strategy: Strategy, actual: list[Layout], choices: list[AxisChoice]
) -> OpPlan:
    candidates = [choice.candidate for choice in choices]
    varying = [_varies(candidate) for candidate in candidates]
    uses = []
    for index, layout in enumerate(actual):
        wanted = layout.with_placements([candidate.inputs[index] for candidate in candidates])
        mask = sum(1 << axis for axis, varies in enumerate(varying) if varies)
        uses.append(OperandUse(wanted, mask & wanted.replicated))
    outputs = _output_layouts(call, strategy, actual, candidates)
    moves = any(choice.bytes > 0 for choice in choices)
    return OpPlan(rule, tuple(uses), outputs, strategy, moves)


def _varies(candidate: AxisStrategy) -> bool:
    return not all(isinstance(p, Replicate) for p in (*candidate.inputs, *candidate.outputs))


def _output_layouts(
    call: OpCall, strategy: Strategy, actual: list[Layout], candidates: Sequence[AxisStrategy]
) -> tuple[Layout, ...]:
    count = len(candidates[0].outputs)
    orders = result_orders(call, strategy, count)
    placements = [tuple(candidate.outputs[i] for candidate in candidates) for i in range(count)]
    return tuple(_layout(actual[0], p, o) for p, o in zip(placements, orders, strict=True))


def _layout(like: Layout, placements: tuple[Placement, ...], order: Order | None) -> Layout:
    return like.with_placements(placements).with_order(order)
