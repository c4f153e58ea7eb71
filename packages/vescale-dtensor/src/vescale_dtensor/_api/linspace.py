"""Ranges of a given number of elements: those of torch, whose rounding depends on the full range.

The signatures are those of `torch.distributed.tensor` (torch 2.14).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._api.factories import Placements, born
from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.protocol import shard_layout
from vescale_dtensor._tensor.dtensor import DTensor

Whole = Callable[[int, torch.device], Tensor]


def linspace(
    start: Any,
    end: Any,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return `steps` numbers from `start` to `end`, inclusive, at equal distances.

    Args:
        start: a number, or a tensor of no dims.
        end: likewise.
        steps: how many; the global shape is `(steps,)`.
        dtype: default: torch's default dtype, complex if one of the two is.
        layout: torch.strided.
        requires_grad: whether gradients are wanted.
        device_mesh: default: the mesh of the enclosing `with mesh:`.
        placements: one per mesh axis; default: replicated.

    Each rank computes the full range for a moment.

    Raises:
        UnsupportedError: another layout than torch.strided.
        LayoutError: `start` or `end` has dims, or placements that do not fit the shape or the mesh.
        MeshError: no mesh.
    """
    first, last = _number("linspace", start), _number("linspace", end)
    return _spaced(
        "linspace",
        steps,
        lambda count, device: torch.linspace(first, last, count, dtype=dtype, device=device),
        device_mesh,
        placements,
        layout=layout,
        requires_grad=requires_grad,
        numbers=(first, last),
    )


def logspace(
    start: Any,
    end: Any,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return `steps` powers of `base`, whose exponents are those of `linspace`; see there."""
    first, last = _number("logspace", start), _number("logspace", end)
    return _spaced(
        "logspace",
        steps,
        lambda count, device: torch.logspace(first, last, count, base, dtype=dtype, device=device),
        device_mesh,
        placements,
        layout=layout,
        requires_grad=requires_grad,
        numbers=(first, last, base),
    )


def _spaced(
    what: str,
    steps: int,
    whole: Whole,
    device_mesh: DeviceMesh | None,
    placements: Placements,
    **options: Any,
) -> DTensor:
    def make(layout: Layout, shape: Shape, device: torch.device) -> Tensor:
        # A part cannot be asked for: torch counts from the nearer end, by vectors.
        numbers = whole(shape[0], device)
        local = numbers.new_empty(local_shape(layout, shape))
        for box in shard_layout(layout, shape, local).boxes:
            (low,), (extent,), at = box.global_offset, box.shape, box.local_offset
            local[at : at + extent] = numbers[low : low + extent]
        return local

    return born(what, (steps,), make, device_mesh, placements, **options)


def _number(what: str, given: Any) -> Any:
    if not isinstance(given, Tensor):
        return given
    if given.dim():
        raise LayoutError(
            f"{what}: start and end are numbers or tensors of no dims, not of shape "
            f"{list(given.shape)}"
        )
    return given.item()
