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

A gradient may outlive its leaf, and when Python frees what is part of a cycle is chance: on each
rank at another time. So nothing here depends on what lives still. A gradient and its views hold the
state, and the state its local tensor: the gradient is reduced as if the leaf lived, on every rank.
The other way references are weak, or a parameter that is dropped would keep its memory until the
next collection of garbage. What has to live as long as the leaf does is held by its wrapper
(`LeafHolds`).
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
from vescale_dtensor._autograd.leaf_references import AxesMask, LeafHolds, ReducesMany
from vescale_dtensor._autograd.uses import average_factor, zero_off_first
from vescale_dtensor._layout.layout import Layout, axes_in
from vescale_dtensor._layout.mesh import axis_names
from vescale_dtensor._layout.placements import Partial, Replicate
from vescale_dtensor._layout.spec import Spec, spec_of, with_strides
from vescale_dtensor._redistribute.half_sums import reduce_over, wide_dtype
from vescale_dtensor._tensor.copied_views import check_unshared
from vescale_dtensor._torch.compat import materialized
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
        local: the leaf's local tensor, whose `.grad` this describes. It holds nothing of this.
        layout: the leaf's layout.
        partial: mask of the axes on which contributions are partial. It only grows, so that the
            layout of the gradient does not change from step to step.
        noted: `partial`, for hooks on the local tensor, which must not hold this.
        is_reduced: whether `.grad` holds the total.
        never_partial: mask of the axes on which contributions stay complete, as captured programs
            use the leaf without a node there; a varying use reduces its own cotangent in backward.
        shape: global shape of the DTensor returned for `.grad`, if there is one; whether it lives
            still is another question.
        views: living views of the gradient, if any; they get a new layout whenever `wrapper` does.
        described: the `.grad` whose memory these have. Where torch replaces `.grad` unseen
            (`create_graph=True`) they are tensors like any others.
        copied: whether a view of `.grad` had to be a copy. While it lives, nothing is added.
        assigned: global shape of a `.grad` whose memory is the user's; None: it is the leaf's own.
        average: product of the sizes of the leaf's `Partial("avg")` axes. Autograd gives each local
            tensor 1/average of the gradient; `.grad` holds the gradient.
        accumulation_hook: the handle of the hook on the node that accumulates, if there is one, and
            the node, if this has to hold it.
        kept: contributions that a layer above holds, while there are any.
    """

    __slots__ = (
        "__weakref__",
        "_gradient_spec",
        "_holds",
        "_reducer",
        "_stays",
        "_wrapper",
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
        "noted",
        "partial",
        "shape",
        "views",
    )

    def __init__(self, local: Tensor, layout: Layout, holds: LeafHolds | None = None) -> None:
        self.local = local
        self.layout = layout
        # None: of a leaf that a captured program makes, which has no wrapper.
        self._holds = None if holds is None else weakref.ref(holds)
        self.average = average_factor(layout)
        self.partial = 0
        self.noted = AxesMask()
        self.never_partial = 0
        self.is_reduced = False
        self.described: Tensor | None = None
        self.copied = False
        self.assigned: tuple[int, ...] | None = None
        self.accumulation_hook: tuple[Any, Any] | None = None
        # Whether it was called, with nothing to do, since it was last needed.
        self._stays = False
        self.kept: KeptElsewhere | None = None
        self.shape: tuple[int, ...] | None = None
        # Weak, as each of them leads back here.
        self._wrapper: weakref.ref[DTensor] | None = None
        # With what it follows from.
        self._gradient_spec: tuple[Spec, int, torch.dtype, Spec] | None = None
        self._reducer: weakref.ref[ReducesMany] | None = None
        # Most gradients have none, and `zero_grad` asks each of them.
        self.views: weakref.WeakValueDictionary[int, DTensor] | None = None

    @property
    def holds(self) -> LeafHolds | None:
        """What the leaf's wrapper holds, while it lives."""
        return None if self._holds is None else self._holds()

    @property
    def wrapper(self) -> DTensor | None:
        """The DTensor last returned for `.grad`.

        It lives as long as the leaf's wrapper does. Who comes from elsewhere, from a view, may find
        it gone on this rank only, and must not send anything other then: see `shape`.
        """
        return None if self._wrapper is None else self._wrapper()

    @property
    def reducer(self) -> ReducesMany | None:
        """What reduces the gradients of many parameters at once; None: each by itself."""
        return None if self._reducer is None else self._reducer()

    @reducer.setter
    def reducer(self, reducer: ReducesMany) -> None:
        self._reducer, holds = weakref.ref(reducer), self.holds
        if holds is not None:
            holds.reducer = reducer
        for each in (self.wrapper, *(() if self.views is None else self.views.values())):
            if each is not None and each._grad_of is not None:
                each._grad_of = self, reducer

    def note_use(self, varying: int) -> None:
        """Note a use that varies on these axes: contributions are partial there from now on."""
        new = varying & ~self.partial
        if not new:
            return
        self.note_partial(new)
        # What was accumulated so far is complete on the new axes, so it is kept on one coordinate,
        # or the reduction would count it once for each. A total is left as it is: it is masked on
        # all partial axes before the next accumulation. In place here and below, since the wrapper
        # that users hold shares this memory; detached, since a recorded gradient has a history.
        found = self.local.grad
        if found is not None and not self.is_reduced:
            with torch.no_grad():
                found.copy_(zero_off_first(found.detach(), self.layout, new))
        self._retype()

    def note_partial(self, axes: int) -> None:
        """Note that contributions are partial on these axes."""
        self.partial |= axes
        self.noted.mask = self.partial

    def gradient_layout(self) -> Layout:
        """Layout of the present value of `.grad`."""
        return cotangent_layout(self.layout, 0 if self.is_reduced else self.partial)

    def pending(self) -> PendingGradient | None:
        """The gradient, if it exists and has not been reduced."""
        if self.local.grad is None or self.is_reduced or not self.partial:
            return None
        names = axis_names(self.layout.mesh)
        axes = tuple(names[a] for a in axes_in(self.partial))
        return PendingGradient(self.local.grad.detach(), self.layout.mesh, axes)

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
        local = self.local
        assert local.grad is not None
        if local.grad._is_zerotensor():
            local.grad = materialized(local.grad)  # symbolic zeros cannot be written to
        return local.grad.detach()

    def note_total(self) -> None:
        """Note that `.grad` holds the total now."""
        self.is_reduced = True
        self._retype()
        self.hook_accumulation()

    def gradient_spec(self, spec: Spec, dtype: torch.dtype) -> Spec:
        """Spec of the present value of `.grad`, of a leaf with this one."""
        partial = 0 if self.is_reduced else self.partial
        known = self._gradient_spec
        # The same at each step, in which it is asked once for each parameter.
        if known is None or known[0] is not spec or known[1:3] != (partial, dtype):
            made = spec_of(self.gradient_layout(), tuple(spec.shape), dtype)
            known = self._gradient_spec = (spec, partial, dtype, made)
        return known[3]

    def describe(self, wrapper: DTensor | None) -> None:
        """Note the wrapper of the present `.grad`; None: there is none to keep."""
        self.described = self.local.grad
        if wrapper is None:
            self._keep(None)
            return
        # `_keep` written out: `zero_grad` makes one for each parameter.
        self._wrapper, self.shape = weakref.ref(wrapper), tuple(wrapper._spec.shape)
        holds = None if self._holds is None else self._holds()
        if holds is not None:
            # Not where a layer above keeps contributions: then `.grad` is to look for those.
            holds.gradient = None if self.kept is not None else wrapper
        wrapper._grad_of = self, None if self._reducer is None else self._reducer()

    def track(self, view: DTensor) -> None:
        """Note a tensor that shares memory with the present `.grad`."""
        if self.views is None:
            self.views = weakref.WeakValueDictionary()
        # By id: a set would compare them, element by element.
        self.views[id(view)] = view
        view._grad_of = self, self.reducer

    def release(self) -> None:
        """Release the wrapper and the views: `.grad` becomes another tensor, or none.

        They keep their memory, and the layout that is true of it: what is partial is reduced by
        itself wherever it is read.
        """
        # Mostly nobody has looked: without a call then.
        if self._wrapper is not None:
            wrapper = self._wrapper()
            if wrapper is not None:
                wrapper._grad_of = None
            self._keep(None)
        self.described = None
        self.copied = False
        if self.views is not None:
            for view in self.views.values():
                view._grad_of = None
            self.views = None

    def _keep(self, wrapper: DTensor | None) -> None:
        """Let this be what `.grad` reads as, held by the leaf's wrapper."""
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)
        self.shape, holds = None, None if self._holds is None else self._holds()
        if holds is not None:
            holds.gradient = wrapper

    def retire(self) -> None:
        """Note that the leaf's wrapper has no use for this any more, whoever else holds it."""
        self.release()
        self._remove_hook()
        self.is_reduced, self.assigned = False, None

    def release_replaced(self) -> None:
        """`release`, if torch has replaced the tensor in `.grad`."""
        if self.described is not None and self.local.grad is not self.described:
            self.release()

    def dropped(self) -> None:
        """Note that `.grad` was set to None."""
        if self.kept is not None:
            self.kept.drop()
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is not None and self.views is None:
            # `release` written out: `zero_grad` comes here for each parameter.
            wrapper._grad_of = self._wrapper = self.shape = self.described = None
            self.copied = False
            holds = None if self._holds is None else self._holds()
            if holds is not None:
                holds.gradient = None
        else:
            self.release()
        self.is_reduced, self.assigned = False, None

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
        self.restore(True, assigned)

    def restore(self, is_reduced: bool, assigned: tuple[int, ...] | None) -> None:
        """Note that `.grad` is again what it was at an earlier moment."""
        self.is_reduced, self.assigned = is_reduced, assigned
        self._retype()
        self.hook_accumulation()  # what ran in between may have used it up

    def hook_accumulation(self) -> None:
        """Register what has to happen to a total before torch adds to it."""
        local = self.local
        # Mostly that of the step before is there, and was just called: a change of dtype drops it.
        stays, self._stays = self._stays, False
        wanted = local.requires_grad and local.is_leaf and (self.is_reduced or self.copied)
        if wanted and stays and self.accumulation_hook is not None:
            return
        holds = self.holds
        self._remove_hook()
        if not wanted:
            return
        # The node leads to this, so this must not hold the node. Where there is no wrapper to hold
        # it, this does, and the node leads here weakly.
        strong = self if self._holds is not None else None
        weak = weakref.ref(self)

        # On the node and not on the tensor: tensor hooks run before this one, also the user's, in
        # which `.grad` may be reduced. And `autograd.grad`, which does not accumulate, runs tensor
        # hooks but not the node.
        def before_accumulation(cotangents: tuple[Tensor | None, ...]) -> Any:
            leaf = weak() if strong is None else strong
            return None if leaf is None else leaf._before_accumulation(cotangents)

        with torch.inference_mode(False):  # in which there are no nodes
            node = get_gradient_edge(local).node
        handle = node.register_prehook(before_accumulation)
        self.accumulation_hook = handle, node if strong is None else None
        if holds is not None:
            holds.accumulation_node = node

    def _remove_hook(self) -> None:
        holds, self._stays = self.holds, False
        if self.accumulation_hook is not None:
            self.accumulation_hook[0].remove()
            self.accumulation_hook = None
        if holds is not None:
            holds.accumulation_node = None

    def _before_accumulation(self, cotangents: tuple[Tensor | None, ...]) -> Any:
        """What is added in place of these cotangents; None: themselves. Collective if assigned."""
        if self.copied:
            self._refuse_stale_copy()
        if self.assigned is not None and self.is_reduced:
            return tuple(None if c is None else self._completed(c) for c in cotangents)
        if not self.is_reduced and self.local.grad is None:
            # The total was dropped, as in most steps, and another one follows: to take the hook off
            # and register it again costs ten times the call.
            self._stays = True
            return None
        # Removed at once, so that backwards without a total in between pay nothing.
        self._remove_hook()
        self._restore_contribution()
        return None

    def _refuse_stale_copy(self) -> None:
        """Refuse to add to `.grad` while a view of it lives that had to be a copy.

        Raises:
            UnsupportedError: one lives, which on one device would change.
        """
        self.release_replaced()
        # In grad mode torch replaces the tensor in `.grad`, and writes to nothing.
        if self.described is not None and not torch.is_grad_enabled():
            # By its memory: the DTensor may be gone, on this rank.
            what = f"accumulation of a gradient: in place on one in the layout {self.layout}"
            check_unshared(self.described, lambda: what)
        self.copied = False  # it is gone

    def _completed(self, contribution: Tensor) -> Tensor:
        """The total of a contribution; differentiable. Collective."""
        arrived, wanted = (dual(GradType(self.layout, mask)) for mask in (self.partial, 0))
        assert self.assigned is not None
        return redistribute_local(contribution, TypedMove(arrived, wanted, self.assigned))

    def _restore_contribution(self) -> None:
        """Keep a total on coordinate 0 of the partial axes, so that it is counted once."""
        # False if `.grad` was set to None since: what comes next is a contribution by itself.
        if not self.is_reduced:
            return
        self.is_reduced = False
        if self.local.grad is not None:
            with torch.no_grad():
                grad = self.local.grad.detach()
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
    if gradient._grad_of is None:
        return None
    leaf: LeafGradient = gradient._grad_of[0]
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
