"""`DTensor.grad`: reading it, assigning it, and dropping it. Reading never communicates.

The gradient of a leaf is the local `.grad` in a wrapper that is kept while `.grad` is the same
tensor. It is partial where the leaf's contributions are (`leaf_gradient`).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from vescale_dtensor._autograd.cotangent import cotangent_layout
from vescale_dtensor._autograd.leaf_gradient import LeafGradient, owner_of
from vescale_dtensor._autograd.leaf_references import LeafHolds
from vescale_dtensor._autograd.local_use import join_hidden_node, leaf_gradient_of
from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._autograd.redistribution_setup import one_mesh
from vescale_dtensor._autograd.user_gradients import as_gradient
from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placements import Partial
from vescale_dtensor._tensor.copied_views import same_memory
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.lineage import note_assigned, pause
from vescale_dtensor._tensor.rare_state import rare_state
from vescale_dtensor._tensor.state import local_replaced
from vescale_dtensor._torch.compat import (
    close_memory,
    forward_grad_enabled,
    materialized,
    new_wrapper,
    stored_gradient,
    with_own_elements,
    without_overrides,
)
from vescale_dtensor._torch.overridable import overridable


def gradient(tensor: DTensor) -> DTensor | None:
    """See `DTensor.grad`.

    Raises:
        UnsupportedError: C++ accumulated a gradient on the wrapper itself.
    """
    local = tensor._local_tensor
    # Optimizers read this several times a step for each parameter: the usual answer comes first.
    holds: LeafHolds | None = tensor._leaf_holds
    if holds is not None:
        wrapper = holds.gradient  # None where a layer above keeps contributions
        if wrapper is not None and wrapper._local_tensor is local.grad:
            return wrapper
    leaf: LeafGradient | None = tensor._leaf_gradient
    if leaf is not None and leaf.kept is not None and leaf.local is local:
        return leaf.kept.gradient(leaf)
    if not local.is_leaf:
        retained: DTensor | None = tensor._rare.retained_grad
        return retained
    # That of the local tensor first, which is an attribute: `zero_grad` comes here for each.
    if local.requires_grad or tensor.requires_grad:
        with without_overrides():
            stray = stored_gradient(tensor)
        if stray is not None:
            raise _stray_gradient(tensor)
    found = local.grad
    if found is None:
        return None
    if found.layout is not torch.strided or found._is_zerotensor():
        # Sparse, or symbolic zeros, which this rank may be alone to have. Stored, so that the
        # wrapper made below shares memory with `.grad`, and can be written to.
        found = local.grad = materialized(found)
    leaf = leaf_gradient_of(tensor) if leaf is None or leaf.local is not local else leaf
    if leaf.described is not None:
        leaf.release_replaced()
    if found.requires_grad and leaf.layout.partial:
        # Recorded (create_graph), and complete where the leaf is a partial sum. To differentiate
        # it again takes a change of type, which is a node, so there is no wrapper to keep.
        partial = 0 if leaf.is_reduced else leaf.partial
        recorded = as_gradient(found, leaf.layout, partial, tensor.shape, of_leaf=True)
        leaf.describe(None)
        leaf.track(recorded)
        return recorded
    # `gradient_spec`, of what it has remembered, and `wrap` written out: each parameter that is
    # stepped comes here once in a step.
    known, partial = leaf._gradient_spec, 0 if leaf.is_reduced else leaf.partial
    if known is not None and known[0] is tensor._spec and known[1:3] == (partial, found.dtype):
        spec = known[3]
    else:
        spec = leaf.gradient_spec(tensor._spec, found.dtype)
    made: DTensor = new_wrapper(DTensor, found, spec, found.requires_grad)
    close_memory(made)
    made._may_have_hidden_node = not forward_grad_enabled()
    made._lineage = 0
    # `note_part` written out, of what is known to be a leaf.
    made._part_of = weakref.ref(tensor)
    made._is_trained_part = tensor._is_trained_part or local.requires_grad
    leaf.describe(made)
    return made


def track_gradient_view(gradient: DTensor, view: DTensor) -> DTensor:
    """Note a view of a leaf's gradient, so that its layout changes when the gradient's does.

    Both share memory: once the gradient is reduced in place, the view holds the total too.
    """
    leaf = owner_of(gradient)
    if leaf is not None and view._view_copy_of is not None and not leaf.copied:
        leaf.copied = True
        leaf.hook_accumulation()
    if leaf is not None and view._grad_of is None and view._view_copy_of is None:
        leaf.track(view)
    return view


def _stray_gradient(tensor: DTensor) -> UnsupportedError:
    """The error about a gradient that C++ accumulated on the wrapper itself, not to be hidden.

    A custom autograd.Function with plain results leaves it.
    """
    return UnsupportedError(
        f"{tensor!r} went into a custom autograd.Function that returned plain tensors, and its "
        "gradient did not reach the local data. Call the Function on x.to_local()."
    )


def set_gradient(tensor: DTensor, value: Any) -> None:
    """Assign `.grad`: None, or a DTensor of the same shape, which is redistributed. Collective.

    Raises:
        LayoutError: a gradient of another shape.
        UnsupportedError: a plain tensor, whose layout is unknown.
    """
    # Asked in this order, as `zero_grad` comes here for each parameter, which has none.
    hides = tensor._may_have_hidden_node or not tensor._local_tensor.requires_grad
    if hides and torch.is_grad_enabled():
        join_hidden_node(tensor)  # a Function's output is no leaf
    local = tensor._local_tensor
    if value is None and not local.is_leaf:
        rare_state(tensor).retained_grad = None
        return
    leaf: Any = tensor._leaf_gradient
    if leaf is None or leaf.local is not local:
        leaf = leaf_gradient_of(tensor)
    if value is None:
        # A rank that keeps what others drop adds its next gradient to it. A recording, which notes
        # no writes, must not see a read: its program would depend on whether a gradient was there.
        if not pause.depth and (local.grad is not None or leaf.kept is not None):
            note_assigned(tensor, "grad")
        if has_torch_function_unary(None):
            drop_gradient(local, leaf)
        else:  # what it does, without two calls for each parameter
            local.grad = None
            leaf.dropped()
        return
    if not isinstance(value, DTensor):
        raise UnsupportedError(
            f"the gradient of {tensor!r} was set to a plain tensor, whose layout is unknown; "
            "wrap it with DTensor.from_local(..., mesh, placements) first"
        )
    if value.shape != tensor.shape:
        raise LayoutError(
            f"the gradient of {tensor!r} was set to a tensor of the shape {list(value.shape)}; "
            "give one of the same global shape"
        )
    if not local.is_leaf:
        rare_state(tensor).retained_grad = value
        return
    if leaf.kept is not None and value is leaf.kept.wrapper:
        return
    if _is_present_gradient(value, leaf):
        # `p.grad = p.grad`: it may still be partial, and stays so.
        if value is not leaf.wrapper:
            _keep_alias(local, leaf, value._local_tensor)
            leaf.describe(value)
        return
    note_assigned(tensor, "grad", value)
    layout = cotangent_layout(tensor._spec.layout, 0)
    total, shape = total_to_keep(value, layout), tuple(tensor.shape)
    if leaf.kept is not None:
        leaf.kept.drop()
    _assign_gradient(local, leaf, total._local_tensor, shape if total is value else None)


def total_to_keep(value: DTensor, layout: Layout) -> DTensor:
    """A tensor in this complete layout: itself, or a copy that shares no memory. Collective."""
    total = redistributed(value, layout)
    if total is value:
        # The gradient of another parameter (`p.grad = q.grad`): both have this memory from now on.
        other = owner_of(value)
        if other is not None and other.shape is not None:
            _hold_total(other, other.shape)
    elif _differ_in_sums_only(value._spec.layout, layout) and not _is_wanted_leaf(value):
        # On one device `value` is the gradient from now on, so it gets the total, too.
        value._local_tensor, value._spec = total._local_tensor, total._spec
        local_replaced(value)
        total = value
    elif same_memory(total._local_tensor, value._local_tensor):
        # A slice of replicated data: what is accumulated must not reach the other ranks' slices.
        total = wrap(total._local_tensor.clone(), total._spec)
    return total


def _is_wanted_leaf(tensor: DTensor) -> bool:
    return tensor._local_tensor.requires_grad and tensor._local_tensor.is_leaf


def _differ_in_sums_only(source: Layout, target: Layout) -> bool:
    """Whether a tensor in the layout `source` only has to be reduced to be in `target`."""
    pairs = zip(source.placements, target.placements, strict=True)
    return one_mesh(source, target) and all(
        isinstance(one, Partial) or one == other for one, other in pairs
    )


def _is_present_gradient(value: DTensor, leaf: LeafGradient) -> bool:
    """Whether a tensor is the leaf's present gradient, or all of its memory in the same order."""
    # From global metadata alone: every rank has to give the same answer.
    wrapper = leaf.wrapper
    return owner_of(value) is leaf and (
        value is wrapper
        or (
            wrapper is not None
            and value._spec.layout.placements == wrapper._spec.layout.placements
            and value._spec.tensor_meta.stride == wrapper._spec.tensor_meta.stride
        )
    )


@overridable
def _keep_alias(local: Tensor, leaf: LeafGradient, alias: Tensor) -> None:
    """Set the gradient to another tensor of the same memory: `p.grad = p.grad.detach()`."""
    former, local.grad = leaf.wrapper, alias
    leaf.describe(None)
    if former is not None:
        leaf.track(former)


def share_gradient(gradient: DTensor) -> None:
    """Let memory of a leaf's gradient be shared with a tensor whose layout cannot follow it.

    Collective, if the gradient is partial: from now on it holds the total at all times.
    """
    leaf = owner_of(gradient)
    # What is recorded is replaced and not written, so that nothing is seen through its memory.
    if leaf is None or not leaf.partial or gradient._local_tensor.requires_grad:
        return
    if leaf.shape is None:
        raise UnsupportedError(
            f"{gradient!r} shares the memory of a gradient that was assigned to `.grad`, whose "
            "layout changes as it is reduced. Give its clone() instead."
        )
    leaf.reduce()
    _hold_total(leaf, leaf.shape)


@overridable
def _hold_total(leaf: LeafGradient, shape: tuple[int, ...]) -> None:
    """Let a gradient hold the total at all times, since others share its memory from now on."""
    leaf.assign_total(shape)


# Overridable, like `_assign_gradient`: torch function modes see no assignment to a local `.grad`,
# and capture has to record it.
@overridable
def drop_gradient(local: Tensor, leaf: LeafGradient) -> None:
    """Set the gradient of a leaf to None."""
    local.grad = None
    leaf.dropped()


def drop_gradients(locals_: list[Tensor], leaves: list[LeafGradient]) -> None:
    """Set the gradients of many leaves to None."""
    for local, leaf in zip(locals_, leaves, strict=True):
        local.grad = None
        # Else nobody has looked at it, as in most steps: written out, for it is asked of each.
        if (
            leaf.is_reduced
            or leaf.described is not None  # as wherever there is a wrapper
            or (leaf.views is not None or leaf.copied or leaf.assigned is not None)
        ):
            leaf.dropped()


@overridable
def _assign_gradient(
    local: Tensor, leaf: LeafGradient, total: Tensor, shape: tuple[int, ...] | None
) -> None:
    """Set the gradient of a leaf to a local tensor that is complete on every replicated axis.

    Args:
        local: the leaf's local tensor.
        leaf: its gradient state.
        total: the gradient.
        shape: its global shape, if others may hold the memory of `total`.
    """
    leaf.release()
    local.grad = with_own_elements(total)
    leaf.assign_total(shape)
