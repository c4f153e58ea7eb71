"""`DTensor.grad`: reading it, assigning it, and dropping it. Reading never communicates.

The gradient of a leaf is the local `.grad` in a wrapper that is kept while `.grad` is the same
tensor. It is partial where the leaf's contributions are (`leaf_gradient`).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.cotangent import cotangent_layout
from vescale_dtensor._autograd.leaf_gradient import LeafGradient
from vescale_dtensor._autograd.local_use import leaf_gradient_of
from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._autograd.user_gradients import as_gradient
from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._tensor.dtensor import DTensor, wrap_as
from vescale_dtensor._torch.compat import (
    materialized,
    own_gradient,
)
from vescale_dtensor._torch.overridable import overridable


def gradient(tensor: DTensor) -> DTensor | None:
    """See `DTensor.grad`."""
    local = tensor._local_tensor
    leaf: LeafGradient | None = tensor._leaf_gradient
    # Optimizers read this several times a step for each parameter: the usual answer comes first.
    if leaf is not None and leaf.wrapper is not None and leaf.wrapper._local_tensor is local.grad:
        return leaf.wrapper
    if not local.is_leaf:
        retained: DTensor | None = tensor._retained_grad
        return retained
    _refuse_stray_gradient(tensor)
    found = local.grad
    if found is None:
        return None
    if found.layout is not torch.strided:
        # Sparse, and local tensors of a DTensor are strided. Stored, so that the wrapper made
        # below shares memory with `.grad`.
        found = local.grad = materialized(found)
    leaf = leaf_gradient_of(tensor)
    if found.requires_grad and leaf.layout.partial:
        # Recorded (create_graph), and complete where the leaf is a partial sum. To differentiate
        # it again takes a change of type, which is a node, so there is no wrapper to keep.
        owed = 0 if leaf.is_reduced else leaf.partial
        return as_gradient(found, leaf.layout, owed, tensor.shape, of_leaf=True)
    wrapper = leaf.wrapper = wrap_as(found, leaf.gradient_layout(), tensor.shape)
    # Weak: the leaf owns the wrapper. By this an op that needs the total finds what to reduce.
    wrapper._grad_of = weakref.ref(leaf)
    return wrapper


def track_gradient_view(gradient: DTensor, view: DTensor) -> DTensor:
    """Note a view of a leaf's gradient, so that its layout changes when the gradient's does.

    Both share memory: once the gradient is reduced in place, the view holds the total too.
    """
    leaf = None if gradient._grad_of is None else gradient._grad_of()
    if leaf is not None and view._grad_of is None and view._view_copy_of is None:
        leaf.views.add(view)
        view._grad_of = weakref.ref(leaf)
    return view


def _refuse_stray_gradient(tensor: DTensor) -> None:
    """Refuse to hide a gradient that C++ accumulated on the wrapper itself.

    Raises:
        UnsupportedError: there is one; a custom autograd.Function with plain results leaves it.
    """
    if tensor.requires_grad and own_gradient(tensor) is not None:
        raise UnsupportedError(
            f"{tensor!r} went into a custom autograd.Function that returned plain tensors, and its "
            "gradient did not reach the local data. Call the Function on x.to_local()."
        )


def set_gradient(tensor: DTensor, value: Any) -> None:
    """Assign `.grad`: None, or a DTensor of the same shape, which is redistributed. Collective.

    Raises:
        LayoutError: a gradient of another shape.
        UnsupportedError: a plain tensor, whose layout is unknown.
    """
    local = tensor._local_tensor
    if value is None and not local.is_leaf:
        tensor._retained_grad = None
        return
    leaf = leaf_gradient_of(tensor)
    if value is None:
        drop_gradient(local, leaf)
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
        tensor._retained_grad = value
        return
    # `p.grad = p.grad`: its local tensor may still be partial, and stays so.
    if value._grad_of is not None and value._grad_of() is leaf:
        local.grad = value._local_tensor
        return
    total = redistributed(value, cotangent_layout(tensor._spec.layout, 0))
    _assign_gradient(local, leaf, total._local_tensor)


# Overridable, like `_assign_gradient`: torch function modes see no assignment to a local `.grad`,
# and capture has to record it.
@overridable
def drop_gradient(local: Tensor, leaf: LeafGradient) -> None:
    """Set the gradient of a leaf to None."""
    # `is_reduced` is about the `.grad` that went. `partial` stays, as it only grows.
    local.grad, leaf.is_reduced, leaf.wrapper = None, False, None


def drop_gradients(locals_: list[Tensor], leaves: list[LeafGradient]) -> None:
    """Set the gradients of many leaves to None."""
    for local, leaf in zip(locals_, leaves, strict=True):
        local.grad, leaf.is_reduced, leaf.wrapper = None, False, None


@overridable
def _assign_gradient(local: Tensor, leaf: LeafGradient, total: Tensor) -> None:
    """Set the gradient of a leaf to a local tensor that is complete on every replicated axis."""
    local.grad = total
    leaf.assign_total()
