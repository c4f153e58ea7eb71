"""Gradients of leaves: a parameter's local `.grad` holds this rank's contribution.

torch's own AccumulateGrad accumulates, so tensor hooks, `zero_grad`, `autograd.grad` and double
backward keep torch's contract. `LeafGradient` remembers on which mesh axes the contribution is one
term of a sum (some use of the parameter varied there), and whether it has been reduced since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import all_reduce, group_of

from vescale_dtensor._autograd.cotangent import cotangent_layout
from vescale_dtensor._autograd.uses import (
    CotangentReduction,
    as_partial,
    average_factor,
    fork_uses,
    zero_off_first,
)
from vescale_dtensor._errors import DTensorError
from vescale_dtensor._layout.layout import Layout, axes_in
from vescale_dtensor._layout.mesh import axis_names
from vescale_dtensor._layout.placements import Partial, Replicate
from vescale_dtensor._layout.spec import spec_of, with_strides
from vescale_dtensor._torch.compat import applied, materialized
from vescale_dtensor._torch.overridable import overridable

if TYPE_CHECKING:
    from vescale_dtensor._tensor.dtensor import DTensor


@dataclass(frozen=True)
class PendingGradient:
    """A gradient that still owes a sum.

    Attributes:
        local: this rank's contribution, a plain tensor.
        mesh: the parameter's mesh.
        axes: names of the mesh axes over which contributions must be added.
    """

    local: Tensor
    mesh: DeviceMesh
    axes: tuple[str, ...]


Reducer = Callable[[list[PendingGradient]], Sequence[Tensor]]


class LeafGradient:
    """The state of one leaf's gradient.

    Attributes:
        partial: mask of the axes where contributions are terms of a sum. It only grows, so the
            type of the gradient does not flicker from step to step.
        is_reduced: whether `.grad` already holds the total.
        never_partial: mask of the axes on which contributions stay complete, because captured
            programs use the leaf as it is there; a use that varies there sums its own part.
        wrapper: of the gradient, as it was last asked for; it refers back weakly, so that no cycle
            keeps the gradient's memory.
        views: of the gradient, that live; what they show is a total when it is.
        average: on how many coordinates in all the leaf is an average of its terms, else one. What
            autograd hands each term is that part of the gradient; `.grad` holds the gradient.
        reducer: reduces the gradients of many parameters at once; None: each by itself.
    """

    __slots__ = (
        "__weakref__",
        "average",
        "has_accumulation_hook",
        "is_reduced",
        "layout",
        "local",
        "never_partial",
        "partial",
        "reducer",
        "views",
        "wrapper",
    )

    def __init__(self, local: Tensor, layout: Layout) -> None:
        self.local = weakref.ref(local)
        self.layout = layout
        self.average = average_factor(layout)
        self.partial = 0
        self.never_partial = 0
        self.is_reduced = False
        self.has_accumulation_hook = False
        self.reducer: GradientReducer | None = None
        self.wrapper: DTensor | None = None
        self.views: weakref.WeakSet[DTensor] = weakref.WeakSet()

    def note_use(self, varying: int) -> None:
        """Note a use that varies on these axes; an earlier total becomes a contribution there."""
        new = varying & ~self.partial
        if not new:
            return
        self.partial |= new
        local = self.local()
        if local is not None and local.grad is not None and not self.is_reduced:
            with torch.no_grad():
                local.grad.copy_(zero_off_first(local.grad.detach(), self.layout, new))
        self._retype()

    def gradient_layout(self) -> Layout:
        """Layout of what `.grad` holds now."""
        return cotangent_layout(self.layout, 0 if self.is_reduced else self.partial)

    def pending(self) -> PendingGradient | None:
        """The gradient, if it still owes a sum."""
        local = self.local()
        if local is None or local.grad is None or self.is_reduced or not self.partial:
            return None
        names = axis_names(self.layout.mesh)
        axes = tuple(names[a] for a in axes_in(self.partial))
        return PendingGradient(local.grad.detach(), self.layout.mesh, axes)

    def reduce(self) -> None:
        """Make `.grad` hold the total. Collective, unless it does already."""
        _reduce_leaf(self)

    def store_total(self, total: Tensor) -> None:
        """Store the total; the next accumulation turns it back into a contribution first."""
        local = self.local()
        assert local is not None
        assert local.grad is not None
        with torch.no_grad():
            if local.grad._is_zerotensor():
                local.grad = materialized(local.grad)  # symbolic zeros cannot be written to
            local.grad.detach().copy_(total)
        self.is_reduced = True
        self._retype()
        self._hook_accumulation(local)

    def assign_total(self) -> None:
        """The user put a total in `.grad` by hand."""
        self.is_reduced = True
        local = self.local()
        if local is not None:
            self._hook_accumulation(local)

    def _hook_accumulation(self, local: Tensor) -> None:
        if self.has_accumulation_hook:
            return
        self.has_accumulation_hook = True
        state = weakref.ref(self)
        handle: Any = None

        def before_accumulation(_: Tensor) -> None:
            handle.remove()
            leaf = state()
            if leaf is not None:
                leaf.has_accumulation_hook = False
                leaf._restore_contribution()

        handle = local.register_hook(before_accumulation)  # type: ignore[no-untyped-call]

    def _restore_contribution(self) -> None:
        local = self.local()
        if not self.is_reduced:
            return
        self.is_reduced = False
        if local is not None and local.grad is not None:
            with torch.no_grad():
                grad = local.grad.detach()
                grad.copy_(zero_off_first(grad, self.layout, self.partial))
        self._retype()

    def _retype(self) -> None:
        wrapper = self.wrapper
        if wrapper is not None:
            spec = wrapper._spec
            layout = self.gradient_layout().with_order(spec.layout.order)
            wrapper._spec = spec_of(layout, spec.shape, spec.tensor_meta.dtype)
        if self.views:
            self._retype_views()

    def _retype_views(self) -> None:
        reduction = Replicate() if self.is_reduced else Partial("sum")
        for view in self.views:
            spec = view._spec.base
            layout = spec.layout.with_placements(
                [
                    reduction if self.partial >> axis & 1 else placement
                    for axis, placement in enumerate(spec.layout.placements)
                ]
            )
            retyped = spec_of(layout, spec.shape, spec.tensor_meta.dtype)
            view._spec = with_strides(retyped, spec.tensor_meta.stride)


@overridable
def _reduce_leaf(leaf: LeafGradient) -> None:
    if leaf.reducer is not None:
        leaf.reducer.reduce()
        return
    pending = leaf.pending()
    if pending is not None:
        group = group_of(pending.mesh, axes_in(leaf.partial))
        with torch.no_grad():
            leaf.store_total(all_reduce(pending.local, group))


class InvariantUse(torch.autograd.Function):
    """A use of a leaf that is invariant on some axes where its gradient may be partial."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, leaf: LeafGradient, varying: int, shape: Any) -> Tensor:
        """Return an alias of the leaf."""
        ctx.leaf, ctx.varying, ctx.shape = leaf, varying, shape
        return local.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Keep the cotangent on coordinate 0 of the axes where the leaf's gradient is partial."""
        leaf, varying = ctx.leaf, ctx.varying
        wide = varying | leaf.partial
        return as_partial(cotangent, leaf.layout, varying, wide, ctx.shape), None, None, None


_invariant_use = applied(InvariantUse)


def is_alias_of_leaf(local: Tensor) -> bool:
    """Whether a local tensor is the alias that `InvariantUse` made of a leaf."""
    return isinstance(local.grad_fn, InvariantUse._backward_cls | AveragedUse._backward_cls)


class AveragedUse(torch.autograd.Function):
    """A use of a leaf that is an average of its terms."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, factor: int) -> Tensor:
        """Return an alias of the leaf."""
        ctx.factor = factor
        return local.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Turn the cotangent of a term into the gradient of the average."""
        return cotangent * ctx.factor, None


_averaged = applied(AveragedUse)


@overridable
def averaged_use(alias: Tensor, factor: int) -> Tensor:
    """An alias of a leaf that is an average."""
    result: Tensor = _averaged(alias, factor)
    return result


@overridable
def leaf_for_use(leaf: LeafGradient, local: Tensor, varying: int, shape: Any) -> Tensor:
    """The leaf as an op uses it that varies on these axes. Costs nothing if it varies on all."""
    if leaf.average != 1:
        return averaged_use(_leaf_for_use(leaf, local, varying, shape), leaf.average)
    return _leaf_for_use(leaf, local, varying, shape)


def _leaf_for_use(leaf: LeafGradient, local: Tensor, varying: int, shape: Any) -> Tensor:
    complete = varying & leaf.never_partial & ~leaf.partial
    if complete:
        kept = varying & ~complete
        reduction = CotangentReduction(leaf.layout, kept, leaf.layout)
        return fork_uses(
            _leaf_for_use(leaf, local, kept, shape), local, (varying,), reduction, shape
        )[0]
    leaf.note_use(varying)
    if not leaf.layout.replicated & ~varying:
        return local
    alias: Tensor = _invariant_use(local, leaf, varying, shape)
    return alias


def try_never_partial(leaf: LeafGradient, varying: int) -> bool:
    """Let uses that vary on these axes alone take the local as it is; whether they may.

    They may where no contribution is a term of a sum on any other axis; from then on none will be.
    """
    complete = leaf.layout.replicated & ~varying
    if leaf.partial & complete:
        return False
    leaf.never_partial |= complete
    return True


class GradientReducer:
    """Hands the unfinished gradients of a list of parameters to one reducer, all at once."""

    def __init__(self, leaves: Sequence[LeafGradient], callback: Reducer) -> None:
        self._leaves = list(leaves)
        self._callback = callback

    def reduce(self) -> None:
        """Reduce every gradient that owes a sum. Collective: the same list on every rank."""
        found = [(leaf, leaf.pending()) for leaf in self._leaves]
        unreduced = [(leaf, pending) for leaf, pending in found if pending is not None]
        if not unreduced:
            return
        with torch.no_grad():
            totals = list(self._callback([pending for _, pending in unreduced]))
        if len(totals) != len(unreduced):
            raise DTensorError(
                f"a gradient reducer got {len(unreduced)} pending gradients and returned "
                f"{len(totals)}; it must return one total for each, in order"
            )
        for (leaf, _), total in zip(unreduced, totals, strict=True):
            leaf.store_total(total)
