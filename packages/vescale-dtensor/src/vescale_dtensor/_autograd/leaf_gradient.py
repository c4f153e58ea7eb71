"""Gradients of leaves: a parameter's local `.grad` holds this rank's contribution.

torch's own AccumulateGrad accumulates, so tensor hooks, `zero_grad`, `autograd.grad` and double
backward keep torch's contract. `LeafGradient` records on which mesh axes the contributions are
partial (some use of the parameter varied there), and whether they have been reduced since.

A reduced `.grad` holds the total on every coordinate. Before the next accumulation a one-shot hook
makes it a contribution again: the total on coordinate 0, zeros elsewhere. That is the same gradient
as a partial sum, so accumulation continues from it without communication.

Not so where the memory of `.grad` is the user's (`p.grad = h`): unknown tensors may share it, and
would hold a contribution without saying so. Such a `.grad` holds the total at all times, and each
contribution is reduced before it is added.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import group_of

from vescale_dtensor._autograd.cotangent import (
    GradType,
    TypedMove,
    cotangent_layout,
    dual,
    redistribute_local,
)
from vescale_dtensor._autograd.uses import (
    CotangentReduction,
    as_partial,
    average_factor,
    fork_uses,
    zero_off_first,
)
from vescale_dtensor._layout.layout import Layout, axes_in
from vescale_dtensor._layout.mesh import axis_names
from vescale_dtensor._layout.placements import Partial, Replicate
from vescale_dtensor._layout.spec import spec_of, with_strides
from vescale_dtensor._redistribute.half_sums import reduce_over, wide_dtype
from vescale_dtensor._tensor.copied_views import check_writable
from vescale_dtensor._torch.compat import applied, materialized
from vescale_dtensor._torch.overridable import overridable

if TYPE_CHECKING:
    from vescale_dtensor._tensor.dtensor import DTensor


@dataclass(frozen=True)
class PendingGradient:
    """A gradient that has not been reduced yet.

    Attributes:
        local: this rank's contribution, a plain tensor.
        mesh: the parameter's mesh.
        axes: names of the mesh axes over which contributions must be added.
    """

    local: Tensor
    mesh: DeviceMesh
    axes: tuple[str, ...]

    @property
    def order(self) -> Literal["native", "rank"]:
        """What to pass as `order=` to `vescale_comm`, so that halves are added in float32."""
        return "native" if wide_dtype(self.local.dtype) is None else "rank"


class ReducesMany(Protocol):
    """What reduces the gradients of many parameters at once."""

    def reduce(self) -> None:
        """Reduce every gradient that has not been reduced. Collective."""


class KeptElsewhere(Protocol):
    """Contributions to a gradient that are not in `.grad`: see `kept_gradient`."""

    @property
    def wrapper(self) -> DTensor:
        """What `.grad` reads as."""

    def gradient(self, leaf: LeafGradient) -> DTensor:
        """The whole gradient, that in `.grad` included."""

    def drop(self) -> None:
        """`.grad` is set to something else."""


Reducer = Callable[[list[PendingGradient]], Sequence[Tensor]]


class LeafGradient:
    """The state of one leaf's gradient.

    Attributes:
        local: weak reference to the leaf's local tensor, whose `.grad` this describes.
        layout: the leaf's layout.
        partial: mask of the axes on which contributions are partial. It only grows, so that the
            layout of the gradient does not change from step to step.
        is_reduced: whether `.grad` holds the total.
        never_partial: mask of the axes on which contributions stay complete, as captured programs
            use the leaf without a node there; a varying use reduces its own cotangent in backward.
        wrapper: the DTensor last returned for `.grad`. It refers back weakly (`_grad_of`), so that
            no cycle keeps the gradient's memory alive.
        views: living views of the gradient, if any; they get a new layout whenever `wrapper` does.
        described: the `.grad` whose memory these have. Where torch replaces `.grad` unseen
            (`create_graph=True`) they are tensors like any others.
        copied: whether a view of `.grad` had to be a copy. While it lives, nothing is added.
        assigned: global shape of a `.grad` whose memory is the user's; None: it is the leaf's own.
        average: product of the sizes of the leaf's `Partial("avg")` axes. Autograd gives each local
            tensor 1/average of the gradient; `.grad` holds the gradient.
        accumulation_hook: the node that accumulates and the handle of the hook on it, if there is
            one. Torch holds the node weakly, and the hook dies with it.
        reducer: reduces the gradients of many parameters at once; None: each is reduced by itself.
        kept: contributions that a layer above holds, while there are any.
    """

    __slots__ = (
        "__weakref__",
        "accumulation_hook",
        "assigned",
        "average",
        "copied",
        "described",
        "is_reduced",
        "kept",
        "layout",
        "local",
        "never_partial",
        "partial",
        "reducer",
        "views",
        "wrapper",
    )

    def __init__(self, local: Tensor, layout: Layout) -> None:
        # Weak: the accumulation hook on the local tensor leads back here.
        self.local = weakref.ref(local)
        self.layout = layout
        self.average = average_factor(layout)
        self.partial = 0
        self.never_partial = 0
        self.is_reduced = False
        self.described: Tensor | None = None
        self.copied = False
        self.assigned: tuple[int, ...] | None = None
        self.accumulation_hook: tuple[Any, Any] | None = None
        self.reducer: ReducesMany | None = None
        self.kept: KeptElsewhere | None = None
        self.wrapper: DTensor | None = None
        # Most gradients have none, and `zero_grad` asks each of them.
        self.views: weakref.WeakValueDictionary[int, DTensor] | None = None

    def note_use(self, varying: int) -> None:
        """Note a use that varies on these axes: contributions are partial there from now on."""
        new = varying & ~self.partial
        if not new:
            return
        self.partial |= new
        local = self.local()
        # What was accumulated so far is complete on the new axes, so it is kept on one coordinate,
        # or the reduction would count it once for each. A total is left as it is: it is masked on
        # all partial axes before the next accumulation. In place here and below, since the wrapper
        # that users hold shares this memory; detached, since a recorded gradient has a history.
        if local is not None and local.grad is not None and not self.is_reduced:
            with torch.no_grad():
                local.grad.copy_(zero_off_first(local.grad.detach(), self.layout, new))
        self._retype()

    def gradient_layout(self) -> Layout:
        """Layout of the present value of `.grad`."""
        return cotangent_layout(self.layout, 0 if self.is_reduced else self.partial)

    def pending(self) -> PendingGradient | None:
        """The gradient, if it exists and has not been reduced."""
        local = self.local()
        if local is None or local.grad is None or self.is_reduced or not self.partial:
            return None
        names = axis_names(self.layout.mesh)
        axes = tuple(names[a] for a in axes_in(self.partial))
        return PendingGradient(local.grad.detach(), self.layout.mesh, axes)

    def reduce(self) -> None:
        """Make `.grad` hold the total. Collective, unless it does already.

        With a `reducer` this reduces the gradients of all its parameters.
        """
        _reduce_leaf(self)

    def store_total(self, total: Tensor) -> None:
        """Write the total into `.grad`; before the next accumulation it is a contribution again."""
        with torch.no_grad():
            self.writable().copy_(total)
        self.note_total()

    def writable(self) -> Tensor:
        """`.grad`, which exists, as a tensor that can be written to."""
        local = self.local()
        assert local is not None
        assert local.grad is not None
        if local.grad._is_zerotensor():
            local.grad = materialized(local.grad)  # symbolic zeros cannot be written to
        return local.grad.detach()

    def note_total(self) -> None:
        """Note that the total was written into `.grad`."""
        self.is_reduced = True
        self._retype()
        self.hook_accumulation()

    def describe(self, wrapper: DTensor | None) -> None:
        """Note the wrapper of the present `.grad`; None: there is none to keep."""
        local = self.local()
        self.wrapper, self.described = wrapper, None if local is None else local.grad
        if wrapper is not None:
            # Weak: the leaf owns the wrapper.
            wrapper._grad_of = weakref.ref(self)

    def track(self, view: DTensor) -> None:
        """Note a tensor that shares memory with the present `.grad`."""
        if self.views is None:
            self.views = weakref.WeakValueDictionary()
        # By id: a set would compare them, element by element.
        self.views[id(view)] = view
        view._grad_of = weakref.ref(self)

    def release(self) -> None:
        """Let go of the wrapper and the views: `.grad` becomes another tensor, or none.

        They keep their memory, and the layout that is true of it: what is partial is reduced by
        itself wherever it is read.
        """
        if self.wrapper is not None:
            self.wrapper._grad_of = None
        self.wrapper = self.described = None
        self.copied = False
        if self.views is not None:
            for view in self.views.values():
                view._grad_of = None
            self.views = None

    def release_replaced(self) -> None:
        """`release`, if torch has replaced the tensor in `.grad`."""
        if self.described is not None:
            local = self.local()
            if local is None or local.grad is not self.described:
                self.release()

    def dropped(self) -> None:
        """Note that `.grad` was set to None."""
        if self.kept is not None:
            self.kept.drop()
        self.forget_gradient()

    def forget_gradient(self) -> None:
        """Note that there is nothing in `.grad`."""
        self.release()
        # Both are about the `.grad` that went. `partial` stays, as it only grows.
        self.is_reduced, self.assigned = False, None

    def assign_total(self, assigned: tuple[int, ...] | None = None) -> None:
        """Note that `.grad` holds a total now.

        Args:
            assigned: its global shape, if others may hold its memory; see the module's docstring.
        """
        self.is_reduced, self.assigned = True, assigned
        self._retype()
        self.hook_accumulation()

    def hook_accumulation(self) -> None:
        """Register what has to happen to a total before torch adds to it."""
        local = self.local()
        if self.accumulation_hook is not None:
            self.accumulation_hook[1].remove()
            self.accumulation_hook = None
        if local is None or not (local.requires_grad and local.is_leaf):
            return
        if not (self.is_reduced or self.copied):
            return
        # Weak: the node leads back here.
        state = weakref.ref(self)

        # On the node and not on the tensor: tensor hooks run before this one, also the user's, in
        # which `.grad` may be reduced. And `autograd.grad`, which does not accumulate, runs tensor
        # hooks but not the node.
        def before_accumulation(cotangents: tuple[Tensor | None, ...]) -> Any:
            leaf = state()
            return None if leaf is None else leaf._before_accumulation(cotangents)

        with torch.inference_mode(False):  # in which there are no nodes
            node = get_gradient_edge(local).node
        self.accumulation_hook = node, node.register_prehook(before_accumulation)

    def _before_accumulation(self, cotangents: tuple[Tensor | None, ...]) -> Any:
        """What is added in place of these cotangents; None: themselves. Collective if assigned."""
        if self.copied:
            self._refuse_stale_copy()
        if self.assigned is not None and self.is_reduced:
            return tuple(None if c is None else self._completed(c) for c in cotangents)
        # Removed at once, so that backwards without a total in between pay nothing.
        if self.accumulation_hook is not None:
            self.accumulation_hook[1].remove()
            self.accumulation_hook = None
        self._restore_contribution()
        return None

    def _refuse_stale_copy(self) -> None:
        """Refuse to add to `.grad` while a view of it lives that had to be a copy.

        Raises:
            UnsupportedError: one lives, which on one device would change.
        """
        self.release_replaced()
        # In grad mode torch replaces the tensor in `.grad`, and writes to nothing.
        if self.wrapper is not None and not torch.is_grad_enabled():
            check_writable(self.wrapper, "accumulation of a gradient")
        self.copied = False  # it is gone

    def _completed(self, contribution: Tensor) -> Tensor:
        """The total of a contribution; differentiable. Collective."""
        arrived, wanted = (dual(GradType(self.layout, mask)) for mask in (self.partial, 0))
        assert self.assigned is not None
        return redistribute_local(contribution, TypedMove(arrived, wanted, self.assigned))

    def _restore_contribution(self) -> None:
        """Keep a total on coordinate 0 of the partial axes, so that it is counted once."""
        local = self.local()
        # False if `.grad` was set to None since: what comes next is a contribution by itself.
        if not self.is_reduced:
            return
        self.is_reduced = False
        if local is not None and local.grad is not None:
            with torch.no_grad():
                grad = local.grad.detach()
                grad.copy_(zero_off_first(grad, self.layout, self.partial))
        self._retype()

    def _retype(self) -> None:
        """Give the gradient's wrapper and its views the layout of what their memory now holds."""
        self.release_replaced()
        wrapper = self.wrapper
        if wrapper is not None:
            spec = wrapper._spec
            layout = self.gradient_layout().with_order(spec.layout.order)
            wrapper._spec = spec_of(layout, spec.shape, spec.tensor_meta.dtype)
        if self.views is not None:
            self._retype_views(self.views.values())

    def _retype_views(self, views: Iterable[DTensor]) -> None:
        # A view may have other dims than the gradient, so its own placements are kept on all other
        # axes. The sum changes on the partial axes only.
        reduction = Replicate() if self.is_reduced else Partial("sum")
        for view in views:
            if view._grad_of is None:
                continue  # it has got other memory since: by an assignment to its `data`
            spec = view._spec.base
            layout = spec.layout.with_placements(
                [
                    reduction if self.partial >> axis & 1 else placement
                    for axis, placement in enumerate(spec.layout.placements)
                ]
            )
            retyped = spec_of(layout, spec.shape, spec.tensor_meta.dtype)
            view._spec = with_strides(retyped, spec.tensor_meta.stride)


def owner_of(gradient: DTensor) -> LeafGradient | None:
    """The leaf whose present `.grad` this tensor is, or shares memory with."""
    leaf: LeafGradient | None = None if gradient._grad_of is None else gradient._grad_of()
    if leaf is None:
        return None
    leaf.release_replaced()
    return None if gradient._grad_of is None else leaf


# Overridable, so that capture records the reduction as one step.
@overridable
def _reduce_leaf(leaf: LeafGradient) -> None:
    """See `LeafGradient.reduce`. Collective."""
    if leaf.reducer is not None:
        leaf.reducer.reduce()
        return
    pending = leaf.pending()
    if pending is not None:
        # One collective over the flattened group of all partial axes, not one per axis.
        group = group_of(pending.mesh, axes_in(leaf.partial))
        with torch.no_grad():
            leaf.store_total(reduce_over(pending.local, group))


class InvariantUse(torch.autograd.Function):
    """A use of a leaf that is invariant on some axes where its gradient may be partial."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, leaf: LeafGradient, varying: int, shape: Any) -> Tensor:
        """Return an alias of the leaf."""
        # The state refers to its local tensor weakly: no cycle through the node.
        ctx.leaf, ctx.varying, ctx.shape = leaf, varying, shape
        return local.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Keep the cotangent on coordinate 0 of the axes where the leaf's gradient is partial."""
        leaf, varying = ctx.leaf, ctx.varying
        # Read now and not in forward: uses noted since may have made further axes partial, and
        # what this one contributes is added to theirs.
        wide = varying | leaf.partial
        return as_partial(cotangent, leaf.layout, varying, wide, ctx.shape), None, None, None


_invariant_use = applied(InvariantUse)


def is_alias_of_leaf(local: Tensor) -> bool:
    """Whether a local tensor is an alias that `InvariantUse` or `AveragedUse` made of a leaf."""
    return isinstance(local.grad_fn, InvariantUse._backward_cls | AveragedUse._backward_cls)


class AveragedUse(torch.autograd.Function):
    """A use of a leaf that is `Partial("avg")`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, factor: int) -> Tensor:
        """Return an alias of the leaf."""
        ctx.factor = factor
        return local.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Turn the local tensor's cotangent, 1/factor of the gradient, into the gradient."""
        return cotangent * ctx.factor, None


_averaged = applied(AveragedUse)


@overridable
def averaged_use(alias: Tensor, factor: int) -> Tensor:
    """An alias of a leaf that is `Partial("avg")` on axes of `factor` coordinates in all."""
    result: Tensor = _averaged(alias, factor)
    return result


@overridable
def leaf_for_use(leaf: LeafGradient, local: Tensor, varying: int, shape: Any) -> Tensor:
    """The leaf's local tensor, or an alias of it, for an op that varies on these axes.

    Notes the use. No node is made where the op varies on every replicated axis.
    """
    if leaf.average != 1:
        return averaged_use(_leaf_for_use(leaf, local, varying, shape), leaf.average)
    return _leaf_for_use(leaf, local, varying, shape)


def _leaf_for_use(leaf: LeafGradient, local: Tensor, varying: int, shape: Any) -> Tensor:
    """`leaf_for_use`, but for the factor of an average."""
    # Axes on which this use varies, but the leaf's contributions have to stay complete: a node of
    # its own reduces this use's cotangent there, in backward. The recursion has none left.
    complete = varying & leaf.never_partial & ~leaf.partial
    if complete:
        kept = varying & ~complete
        reduction = CotangentReduction(leaf.layout, kept, leaf.layout)
        return fork_uses(
            _leaf_for_use(leaf, local, kept, shape), local, (varying,), reduction, shape
        )[0]
    leaf.note_use(varying)
    # Partial on every axis where it can be: nothing to mask, so no node.
    if not leaf.layout.replicated & ~varying:
        return local
    alias: Tensor = _invariant_use(local, leaf, varying, shape)
    return alias


def try_never_partial(leaf: LeafGradient, varying: int) -> bool:
    """Try to mark the replicated axes not in `varying` as never partial.

    Uses that vary on exactly these axes then need no autograd node.

    Returns:
        Whether it was possible: not if contributions are partial on such an axis already.
    """
    complete = leaf.layout.replicated & ~varying
    if leaf.partial & complete:
        return False
    leaf.never_partial |= complete
    return True
