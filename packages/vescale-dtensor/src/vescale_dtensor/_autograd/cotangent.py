"""Redistribution of plain local tensors with typed gradients, to any order of differentiation.

A backward pass redistributes cotangents (gradients with respect to a tensor). If it is itself
recorded (`create_graph=True`), those redistributions need gradients in turn, and the typed rule
holds for them too: a cotangent that is replicated because its tensor is a partial sum is used by a
varying operation, so *its* cotangent arrives partial. `GradType` is the type of a tensor: a layout,
and the axes on which its uses vary. `dual` gives the type of its cotangent; for partial sums
`dual(dual(t)) == t`. Averages are sums here: callers apply their factor (`average_factor`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vescale_comm import Group, all_reduce, group_of

from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import Partial, Replicate
from vescale_dtensor._redistribute.execute import run_redistribution
from vescale_dtensor._redistribute.plan import plan_redistribution
from vescale_dtensor._redistribute.steps import AllReduce
from vescale_dtensor._tensor.observers import notify_redistribution, observers
from vescale_dtensor._torch.compat import materialized
from vescale_dtensor._torch.overridable import overridable
from vescale_dtensor._torch.worlds import cached

# Dtypes whose elements travel as they are: nothing is widened, conjugated or packed.
_PLAIN = frozenset({torch.float32, torch.float64})


class GradType(NamedTuple):
    """A local tensor's layout, and a bit mask of the replicated axes on which its uses vary."""

    layout: Layout
    varying: int


class TypedMove(NamedTuple):
    """A redistribution from one type to another, of a tensor of this global shape."""

    source: GradType
    target: GradType
    shape: tuple[int, ...]

    def transposed(self) -> TypedMove:
        """The redistribution of the cotangent: from the dual target to the dual source type."""
        return TypedMove(dual(self.target), dual(self.source), self.shape)


def dual(grad_type: GradType) -> GradType:
    """The type of a tensor's cotangent."""
    # The cotangent of a partial tensor is complete on every coordinate (each local tensor adds to
    # the sum with factor one), and is used varyingly there: each rank uses it for other data.
    return GradType(cotangent_layout(grad_type.layout, grad_type.varying), grad_type.layout.partial)


@cached(4096)
def cotangent_layout(layout: Layout, varying: int) -> Layout:
    """Layout of a tensor's cotangent: the typed rule, axis by axis.

    `Shard` stays as it is, `Partial` becomes `Replicate`, and `Replicate` becomes `Partial("sum")`
    on the axes in the mask `varying`.
    """

    def one(axis: int, placement: Placement) -> Placement:
        if isinstance(placement, Partial):
            return Replicate()
        if isinstance(placement, Replicate) and varying >> axis & 1:
            return Partial("sum")
        return placement

    return layout.with_placements([one(a, p) for a, p in enumerate(layout.placements)])


def redistribute_local(local: Tensor, move: TypedMove) -> Tensor:
    """The local tensor of the target type. Collective if the plan has steps; differentiable."""
    # Types are compared, not layouts: two types of one layout can differ in `varying`. Nothing is
    # sent between them, but a recorded gradient needs a node, as its layout differs.
    if move.source == move.target:
        return local
    if torch.is_grad_enabled() and local.requires_grad:
        return _recorded_move(local, move)
    return _execute(local, move)


# Overridable, so that capture records the node as one call: a mode sees no custom autograd nodes.
@overridable
def _recorded_move(local: Tensor, move: TypedMove) -> Tensor:
    result: Tensor = _RedistributeLocal.apply(local, move)  # type: ignore[no-untyped-call]
    return result


class PreparedMove:
    """A redistribution that comes again and again, of cotangents that one node gets.

    Args:
        move: between different types.
    """

    __slots__ = ("_sums", "move")

    def __init__(self, move: TypedMove) -> None:
        self.move = move
        # By dtype: the group over which it is one sum, and the local shape; None if it is not.
        self._sums: dict[torch.dtype, tuple[Group, Shape] | None] = {}

    def run(self, local: Tensor) -> Tensor:
        """`redistribute_local`. Collective; differentiable."""
        dtype = local.dtype
        if observers or dtype not in _PLAIN or (local.requires_grad and torch.is_grad_enabled()):
            return redistribute_local(local, self.move)
        if dtype not in self._sums:
            self._sums[dtype] = _only_sum(self.move, local.element_size())
        found = self._sums[dtype]
        # A usual backward is this, and a plan is looked up and walked through for nothing.
        if found is None or found[1] != local.shape or local.layout is not torch.strided:
            return redistribute_local(local, self.move)
        if local._is_zerotensor() or local.is_neg() or local.is_meta:
            return redistribute_local(local, self.move)
        return all_reduce(local, found[0])


def _only_sum(move: TypedMove, element_size: int) -> tuple[Group, Shape] | None:
    """The group over which a redistribution is one sum, with the local shape; None if it is not."""
    source, target = move.source.layout, move.target.layout
    plan = plan_redistribution(source, target, move.shape, element_size)
    (step, *more) = plan.steps or (None,)
    if more or not isinstance(step, AllReduce) or step.op != "sum" or plan.ends_in_view:
        return None
    return group_of(plan.mesh, step.axes), local_shape(source, plan.shape)


def is_noop(move: TypedMove) -> bool:
    """Whether a redistribution has no steps. Every rank plans the same, so all get one answer."""
    return not plan_redistribution(move.source.layout, move.target.layout, move.shape).steps


def _execute(local: Tensor, move: TypedMove) -> Tensor:
    """Run a redistribution outside of autograd, and notify observers. Collective."""
    source, target = move.source.layout, move.target.layout
    # A plan follows from the layouts and the global shape, never from local data, so every rank
    # makes the same one without communication.
    plan = plan_redistribution(source, target, move.shape, local.element_size())
    if observers and plan.steps:
        notify_redistribution(plan, backward=True)
    return run_redistribution(plan, materialized(local))


class _RedistributeLocal(torch.autograd.Function):
    """The autograd node of a recorded redistribution; backward runs the transposed one."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, move: TypedMove) -> Tensor:
        ctx.move = move
        # A plan without steps returns its input. torch treats an input that forward returns as a
        # view of itself and forbids in-place ops on it; detach() makes another tensor object.
        return _execute(local.detach(), move).detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        # Not `_execute`: `redistribute_local` records itself again if this backward is recorded.
        return redistribute_local(cotangent, ctx.move.transposed()), None
