"""Changes of what a wrapper stands for: `.data = …`, `set_`, in-place views, `requires_grad_`.

Each of them ends in a call of `_tensor.state`, which drops what the wrapper has cached about its
old local tensor. A leaf keeps its gradient, as in torch, and a gradient stays that of its leaf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.cotangent import cotangent_layout
from vescale_dtensor._autograd.grad_property import gradient, set_gradient, total_to_keep
from vescale_dtensor._autograd.leaf_gradient import LeafGradient, owner_of
from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.copied_views import mark_copy
from vescale_dtensor._tensor.dtensor import DTensor, may_have_hidden_node, wrap
from vescale_dtensor._tensor.lineage import note_assigned
from vescale_dtensor._tensor.state import data_written, local_escaped, local_replaced
from vescale_dtensor._torch.compat import (
    hidden_node,
    mirror_metadata,
    mirror_requires_grad,
    with_own_elements,
)
from vescale_dtensor._torch.overridable import overridable


def set_data(tensor: DTensor, value: Any) -> None:
    """Assign `.data`. Collective if a value of the same shape has another layout.

    Args:
        tensor: keeps its layout if the shapes are equal, and takes the value's if they differ.
        value: a DTensor.

    Raises:
        UnsupportedError: a plain tensor, whose layout is unknown.
    """
    if not isinstance(value, DTensor):
        raise UnsupportedError(
            f"the data of {tensor!r} was set to a plain tensor, whose layout is unknown; "
            "use distribute_tensor(value, mesh, placements)"
        )
    owner = owner_of(tensor)
    if owner is not None and tensor is owner.wrapper:
        _set_gradient_data(tensor, owner, value)
        return
    if _is_set_as_kept(tensor, value):
        return
    if owner is not None:
        tensor._grad_of = None  # a view of a gradient gets memory of its own
    if value.shape != tensor.shape:
        _refuse_shape_of_gradient(tensor, value)
    given = value
    with torch.no_grad():
        if value.shape == tensor.shape:
            value = redistributed(value, tensor._spec.layout)
        # Into the local tensor's `.data`, not a new local: it stays the same leaf, and keeps its
        # `.grad` and hooks. torch does not count this in the version, hence `data_written`.
        if tensor._data_uses is None:
            tensor._local_tensor.data = value._local_tensor.detach()
        else:
            set_gathered_data(tensor._local_tensor, value._local_tensor.detach())
            tensor._data_uses.append((id(tensor), None))
        if tensor._rare.memory is not None:
            tensor._rare.memory = None
    _take_spec(tensor, value._spec)
    data_written(tensor)
    note_assigned(tensor, "data", given)
    # The value's memory is this tensor's now, and whoever holds the value may write to it.
    local_escaped(tensor)
    leaf: LeafGradient | None = tensor._leaf_gradient
    if leaf is not None and leaf.layout.placements != tensor._spec.layout.placements:
        local_replaced(tensor)  # data of another shape: it has no gradient, as said above
    elif leaf is not None:
        leaf.hook_accumulation()  # torch makes another node where the dtype or the device differs


@overridable
def set_gathered_data(local: Tensor, data: Tensor) -> None:
    """Assign the `.data` of gathered values, which a recording refuses by this name.

    A replay would not tell whoever stores them.
    """
    local.data = data


def _set_gradient_data(gradient: DTensor, owner: LeafGradient, value: DTensor) -> None:
    """Assign `.data` of a leaf's gradient: it holds a total afterwards. Collective.

    Raises:
        UnsupportedError: a value of another shape.
    """
    if value.shape != gradient.shape:
        raise UnsupportedError(
            f"the data of {gradient!r}, the gradient of a leaf, was set to data of the shape "
            f"{list(value.shape)}; assign .grad of the leaf instead"
        )
    with torch.no_grad():
        total = total_to_keep(value, cotangent_layout(owner.layout, 0))
    # Views of it keep the former memory, as in torch.
    owner.release()
    gradient._local_tensor.data = with_own_elements(total._local_tensor.detach())
    _take_spec(gradient, total._spec)
    data_written(gradient)
    owner.describe(gradient)
    owner.assign_total(tuple(gradient.shape) if total is value else None)


def _is_set_as_kept(gradient: DTensor, value: DTensor) -> bool:
    """Set what a layer above keeps of a leaf's gradient, if that is what this tensor is.

    Collective then: `p.grad.data = x` is `p.grad = x`, which drops what was kept.
    """
    whole: Any = None if gradient._part_of is None else gradient._part_of()
    leaf = None if whole is None else whole._leaf_gradient
    if leaf is None or leaf.kept is None or leaf.kept.wrapper is not gradient:
        return False
    set_gradient(whole, value)
    # It is the gradient still, of the memory that this has from now on.
    gradient._local_tensor = leaf.local.grad
    _take_spec(gradient, leaf.gradient_spec(whole._spec, leaf.local.grad.dtype))
    local_replaced(gradient)
    leaf.describe(gradient)
    return True


def _refuse_shape_of_gradient(tensor: DTensor, value: DTensor) -> None:
    """Refuse to give a leaf another shape than the gradient that it has.

    Raises:
        UnsupportedError: it has one.
    """
    if tensor._local_tensor.is_leaf and tensor._local_tensor.grad is not None:
        raise UnsupportedError(
            f"{tensor!r} was to become {list(value.shape)}, and has a gradient of its former "
            "shape: set .grad to None first"
        )


def _take_spec(tensor: DTensor, spec: Spec) -> None:
    """Give a wrapper another shape, dtype or layout, in Python and in C++."""
    # C++ keeps a copy of shape, strides and dtype in the wrapper, apart from the spec.
    if spec is not tensor._spec:
        tensor._spec = spec
        mirror_metadata(tensor, wrap(tensor._local_tensor.detach(), spec))


def set_(tensor: DTensor, other: DTensor) -> DTensor:
    """`Tensor.set_`: take the data, shape and layout of another DTensor."""
    if owner_of(tensor) is not None:
        set_data(tensor, other)
        return tensor
    if _is_set_as_kept(tensor, other):
        return tensor
    if other.shape != tensor.shape:
        _refuse_shape_of_gradient(tensor, other)
    # The local tensor stays the same object and keeps its `.grad`, but its state is dropped.
    kept = gradient(tensor) if tensor._local_tensor.is_leaf else None
    with torch.no_grad():
        taker: Any = tensor._local_tensor
        taker.set_(other._local_tensor)
        if tensor._rare.memory is not None:
            tensor._rare.memory = None
    _take_spec(tensor, other._spec)
    local_replaced(tensor)
    if kept is not None:
        set_gradient(tensor, kept)
    return tensor


def become_view_in_place(tensor: DTensor, view: DTensor) -> DTensor:
    """Turn a tensor into a view of it, in place (`transpose_`, `squeeze_`).

    Where the view had to be a copy, the tensor is marked as one, and writes to it are refused.

    Raises:
        UnsupportedError: the tensor is, or has, the gradient of a leaf, which would not follow.
    """
    if view is not tensor:
        _refuse_shape_of_gradient(tensor, view)
        owner = owner_of(tensor)
        if owner is not None and tensor is owner.wrapper:
            raise UnsupportedError(
                f"{tensor!r} is the gradient of a leaf, which keeps its shape: call the function "
                "that returns a view instead, and assign its result to .grad if that is meant"
            )
        if view._view_copy_of is not None:
            mark_copy(tensor, view)
        tensor._local_tensor = view._local_tensor
        _take_spec(tensor, view._spec)
        local_replaced(tensor)
    return tensor


def set_requires_grad(tensor: DTensor, requires_grad: bool = True) -> DTensor:
    """`Tensor.requires_grad_`: on the local tensor and on the wrapper.

    Raises:
        RuntimeError: False, for a tensor that an op or a custom autograd.Function made.
    """
    if may_have_hidden_node(tensor) and hidden_node(tensor) is not None:
        # No leaf, although its local tensor is one until the first use: torch answers.
        mirror_requires_grad(tensor, requires_grad)
        return tensor
    if requires_grad and tensor._local_tensor._is_view() and not tensor._local_tensor.requires_grad:
        # A write to a leaf's memory makes torch build the history of its views again, from what the
        # leaf is a view of: that wants no gradient (a piece of what a kernel gathered, say).
        tensor._local_tensor = tensor._local_tensor.detach()
    # Autograd works on the local tensor. By the wrapper's flag `Function.apply` notices it.
    tensor._local_tensor.requires_grad_(requires_grad)
    mirror_requires_grad(tensor, requires_grad)
    leaf: LeafGradient | None = tensor._leaf_gradient
    if leaf is not None:
        leaf.hook_accumulation()  # there is no node to hook while no gradient is wanted
    return tensor
