"""Typed gradients of redistributions of plain local tensors, to any order of differentiation.

A backward pass redistributes cotangents. Where it is itself recorded (`create_graph=True`), these
redistributions need gradients in turn, and the typed rule holds for them too: a cotangent that is
replicated because its tensor is a partial sum is used by a varying operation, so *its* cotangent
arrives partial. `GradType` states that of a tensor; `dual` gives the type of its cotangent, and
`dual(dual(t)) == t`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placements import Partial, Placement, Replicate
from vescale_dtensor._redistribute.execute import run_redistribution
from vescale_dtensor._redistribute.plan import plan_redistribution
from vescale_dtensor._tensor.observers import notify_redistribution, observers
from vescale_dtensor._torch.compat import materialized
from vescale_dtensor._torch.overridable import overridable


class GradType(NamedTuple):
    """How a local tensor lies, and on which of its replicated axes its uses vary."""

    layout: Layout
    varying: int


class TypedMove(NamedTuple):
    """A change from one side to another of a tensor of this global shape."""

    source: GradType
    target: GradType
    shape: tuple[int, ...]

    def transposed(self) -> TypedMove:
        """The move that the cotangent makes."""
        return TypedMove(dual(self.target), dual(self.source), self.shape)


def dual(grad_type: GradType) -> GradType:
    """The side of a tensor's cotangent."""
    return GradType(cotangent_layout(grad_type.layout, grad_type.varying), grad_type.layout.partial)


@lru_cache(maxsize=4096)
def cotangent_layout(layout: Layout, varying: int) -> Layout:
    """Layout of the cotangent of a tensor, partial on the `varying` axes where it is replicated."""

    def one(axis: int, placement: Placement) -> Placement:
        if isinstance(placement, Partial):
            return Replicate()
        if isinstance(placement, Replicate) and varying >> axis & 1:
            return Partial("sum")
        return placement

    return layout.with_placements([one(a, p) for a, p in enumerate(layout.placements)])


def redistribute_local(local: Tensor, move: TypedMove) -> Tensor:
    """The local tensor on the other side. Collective, where data has to move."""
    # Sides are compared and not layouts: what is whole and what is a term may lie alike, and
    # differ in what their own gradients are.
    if move.source == move.target:
        return local
    if torch.is_grad_enabled() and local.requires_grad:
        return _recorded_move(local, move)
    return _execute(local, move)


@overridable
def _recorded_move(local: Tensor, move: TypedMove) -> Tensor:
    result: Tensor = _RedistributeLocal.apply(local, move)  # type: ignore[no-untyped-call]
    return result


def is_noop(move: TypedMove) -> bool:
    """Whether a move changes no data, on any rank."""
    return not plan_redistribution(move.source.layout, move.target.layout, move.shape).steps


def _execute(local: Tensor, move: TypedMove) -> Tensor:
    source, target = move.source.layout, move.target.layout
    # Layouts of pieces and the global shape are all that a plan needs, so every rank makes the
    # same one without asking.
    plan = plan_redistribution(source, target, move.shape, local.element_size())
    if observers and plan.steps:
        notify_redistribution(plan, backward=True)
    return run_redistribution(plan, materialized(local))


class _RedistributeLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, move: TypedMove) -> Tensor:
        ctx.move = move
        # Where nothing is to be moved that would be the input itself, which torch would take for a
        # view of it, and forbid to write to.
        return _execute(local.detach(), move).detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        # Through `redistribute_local` again: it is recorded if this backward is, to any order.
        return redistribute_local(cotangent, ctx.move.transposed()), None
