"""A tensor that takes on other data: `.data = …`, `set_`, in-place views, `requires_grad_`."""

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
    """Assign `.data`: the same shape, any layout; the tensor keeps its layout unless shapes differ.

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
        tensor._local_tensor.data = value._local_tensor.detach()
    _take_spec(tensor, value._spec)
    data_written(tensor)


def _take_spec(tensor: DTensor, spec: Spec) -> None:
    """Take on another shape, dtype or layout, also for what C++ knows of the wrapper."""
    if spec is not tensor._spec:
        tensor._spec = spec
        mirror_metadata(tensor, wrap(tensor._local_tensor.detach(), spec))


def set_(tensor: DTensor, other: DTensor) -> DTensor:
    """`Tensor.set_`: the same data as another DTensor, whatever shape and layout it has."""
    with torch.no_grad():
        taker: Any = tensor._local_tensor
        taker.set_(other._local_tensor)
    _take_spec(tensor, other._spec)
    local_replaced(tensor)
    return tensor


def become_view_in_place(tensor: DTensor, view: DTensor) -> DTensor:
    """Let a tensor be what a view of it is, in place; where that is a copy, writes are refused."""
    if view is not tensor:
        if view._view_copy_of is not None:
            mark_copy(tensor, view)
        tensor._local_tensor = view._local_tensor
        _take_spec(tensor, view._spec)
        local_replaced(tensor)
    return tensor


def set_requires_grad(tensor: DTensor, requires_grad: bool = True) -> DTensor:
    """`Tensor.requires_grad_`: on the local and on the wrapper."""
    tensor._local_tensor.requires_grad_(requires_grad)
    mirror_requires_grad(tensor, requires_grad)
    return tensor
