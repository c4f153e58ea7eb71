"""Changes of what a wrapper stands for: `.data = …`, `set_`, in-place views, `requires_grad_`.

Each of them ends in a call of `_tensor.state`, which drops what the wrapper has cached about its
old local tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.copied_views import mark_copy
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.state import data_written, local_replaced
from vescale_dtensor._torch.compat import mirror_metadata, mirror_requires_grad


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
    with torch.no_grad():
        if value.shape == tensor.shape:
            value = redistributed(value, tensor._spec.layout)
        # Into the local tensor's `.data`, not a new local: it stays the same leaf, and keeps its
        # `.grad` and hooks. torch does not count this in the version, hence `data_written`.
        tensor._local_tensor.data = value._local_tensor.detach()
    _take_spec(tensor, value._spec)
    data_written(tensor)


def _take_spec(tensor: DTensor, spec: Spec) -> None:
    """Give a wrapper another shape, dtype or layout, in Python and in C++."""
    # C++ keeps a copy of shape, strides and dtype in the wrapper, apart from the spec.
    if spec is not tensor._spec:
        tensor._spec = spec
        mirror_metadata(tensor, wrap(tensor._local_tensor.detach(), spec))


def set_(tensor: DTensor, other: DTensor) -> DTensor:
    """`Tensor.set_`: take the data, shape and layout of another DTensor."""
    with torch.no_grad():
        taker: Any = tensor._local_tensor
        taker.set_(other._local_tensor)
    _take_spec(tensor, other._spec)
    local_replaced(tensor)
    return tensor


def become_view_in_place(tensor: DTensor, view: DTensor) -> DTensor:
    """Turn a tensor into a view of it, in place (`transpose_`, `squeeze_`).

    Where the view had to be a copy, the tensor is marked as one, and writes to it are refused.
    """
    if view is not tensor:
        if view._view_copy_of is not None:
            mark_copy(tensor, view)
        tensor._local_tensor = view._local_tensor
        _take_spec(tensor, view._spec)
        local_replaced(tensor)
    return tensor


def set_requires_grad(tensor: DTensor, requires_grad: bool = True) -> DTensor:
    """`Tensor.requires_grad_`: on the local tensor and on the wrapper."""
    # Autograd works on the local tensor. By the wrapper's flag `Function.apply` notices it.
    tensor._local_tensor.requires_grad_(requires_grad)
    mirror_requires_grad(tensor, requires_grad)
    return tensor
