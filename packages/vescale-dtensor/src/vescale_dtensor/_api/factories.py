"""Factories of DTensors; each rank makes its own local tensor and nothing else.

The signatures are those of `torch.distributed.tensor`. Random factories draw, through vescale_rng,
the numbers that one device would have drawn, and leave the generator where it would be there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
import vescale_rng
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._layout.layout import Layout, Shape, normalized
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.mesh import current_mesh
from vescale_dtensor._layout.placements import Partial, Replicate
from vescale_dtensor._layout.protocol import shard_layout
from vescale_dtensor._layout.rng_layout import random_layout
from vescale_dtensor._tensor.dtensor import DTensor, wrap_as
from vescale_dtensor._tensor.fork_check import refuse_if_forked
from vescale_dtensor._tensor.lineage import looked_at, note_origin
from vescale_dtensor._torch.untraced import untraced

Placements = Sequence[object] | None
Make = Callable[[Layout, Shape, torch.device], Tensor]

# A multiple of every vector length of torch's CPU kernels (see `_ranged`).
_RANGE_BLOCK = 64


@untraced
def born(
    what: str,
    size: tuple[Any, ...],
    make: Make,
    device_mesh: DeviceMesh | None,
    placements: Placements,
    *,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    numbers: tuple[Any, ...] = (),
) -> DTensor:
    """Make a tensor of global `size`, whose local tensor is made by `make(layout, shape, device)`.

    Args:
        what: name of the factory, for messages.
        size: extents, or one sequence of them.
        make: makes the local tensor of a layout without partial placements.
        device_mesh: default: the mesh of the enclosing `with mesh:`.
        placements: one per mesh axis; default: replicated.
        layout: torch.strided.
        requires_grad: whether gradients are wanted.
        numbers: those that it is made by.

    Raises:
        UnsupportedError: another layout than torch.strided, or a process that a rank has forked.
        LayoutError: placements that do not fit the shape or the mesh.
        MeshError: no mesh.
    """
    if layout is not torch.strided:
        raise UnsupportedError(f"{what}(layout={layout}): only torch.strided can be distributed")
    refuse_if_forked(what)
    shape = _as_shape(size)
    mesh = device_mesh if device_mesh is not None else current_mesh(what)
    wanted = placements if placements is not None else [Replicate()] * mesh.ndim
    target = Layout.of(mesh, normalized(wanted, len(shape)))
    # A partial tensor is made replicated and then masked to coordinate 0, which is a local step.
    without_partials = [Replicate() if isinstance(p, Partial) else p for p in target.placements]
    source = target.with_placements(without_partials)
    # A leaf: what makes it must not become its history.
    with torch.no_grad():
        local = make(source, shape, torch.device(mesh.device_type))
        result = redistributed(wrap_as(local, source, shape), target)
    note_origin(result, looked_at(mesh, numbers))
    # Only now, so that the result is a leaf whatever redistribution came before.
    if requires_grad:
        result.requires_grad_()
    return result


def _as_shape(size: tuple[Any, ...]) -> Shape:
    """Return a size that was given as numbers, or as one sequence of them.

    Raises:
        LayoutError: a negative extent.
    """
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(size[0])
    if any(extent < 0 for extent in size):
        raise LayoutError(f"a size with a negative extent: {list(size)}")
    return tuple(int(extent) for extent in size)


def _constant(func: Callable[..., Tensor], dtype: torch.dtype | None, *fill: Any) -> Make:
    """Return a `Make` that calls a factory of torch on the local shape."""

    def make(layout: Layout, shape: Shape, device: torch.device) -> Tensor:
        return func(local_shape(layout, shape), *fill, dtype=dtype, device=device)

    return make


def drawn(
    distribution: vescale_rng.Distribution,
    dtype: torch.dtype | None,
    generator: torch.Generator | None = None,
) -> Make:
    """Return a `Make` that draws the numbers which one device would draw for these elements."""

    def make(layout: Layout, shape: Shape, device: torch.device) -> Tensor:
        local = torch.empty(local_shape(layout, shape), dtype=dtype, device=device)
        rng_layout = random_layout(layout, shape, local, generator)
        # By elements and not by local tensor: empty shards advance the generator, too, so that it
        # stays equal on all ranks.
        return vescale_rng.fill_(local, distribution, rng_layout, generator=generator)

    return make


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a tensor of global shape `size` with arbitrary values.

    Args:
        size: extents, or one sequence of them.
        dtype: default: torch's default dtype.
        layout: torch.strided.
        requires_grad: whether gradients are wanted.
        device_mesh: default: the mesh of the enclosing `with mesh:`.
        placements: one per mesh axis; default: replicated.

    Raises:
        UnsupportedError: another layout than torch.strided.
        LayoutError: placements that do not fit the shape or the mesh.
        MeshError: no mesh.
    """
    make = _constant(torch.empty, dtype)
    return born(
        "empty", size, make, device_mesh, placements, layout=layout, requires_grad=requires_grad
    )


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a tensor of zeros; see `empty`."""
    make = _constant(torch.zeros, dtype)
    return born(
        "zeros", size, make, device_mesh, placements, layout=layout, requires_grad=requires_grad
    )


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a tensor of ones; see `empty`."""
    make = _constant(torch.ones, dtype)
    return born(
        "ones", size, make, device_mesh, placements, layout=layout, requires_grad=requires_grad
    )


def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return a tensor of one value, whose dtype is by default that of the value; see `empty`."""
    make = _constant(torch.full, dtype, fill_value)
    extents = tuple(size) if isinstance(size, Sequence) else (size,)
    return born(
        "full",
        extents,
        make,
        device_mesh,
        placements,
        layout=layout,
        requires_grad=requires_grad,
        numbers=(fill_value,),
    )


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return uniform numbers in [0, 1): those of `torch.rand(size)` on one device; see `empty`."""
    make = drawn(vescale_rng.Uniform(0.0, 1.0), dtype)
    return born(
        "rand", size, make, device_mesh, placements, layout=layout, requires_grad=requires_grad
    )


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return normal numbers: those that `torch.randn(size)` draws on one device; see `empty`."""
    make = drawn(vescale_rng.Normal(0.0, 1.0), dtype)
    return born(
        "randn", size, make, device_mesh, placements, layout=layout, requires_grad=requires_grad
    )


def randint(
    low: int,
    high: int | Sequence[int],
    size: Sequence[int] | None = None,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = torch.int64,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return integers in [low, high): those that `torch.randint` draws on one device; see `empty`.

    `randint(high, size)` starts at 0, as in torch.
    """
    if size is None and isinstance(high, Sequence):
        size = high
        # The short form gave the upper bound in place of the lower one.
        low, high = 0, low
    if size is None or isinstance(high, Sequence):
        raise LayoutError(f"randint({low}, {high}, size={size}): give low, high and size")
    make = drawn(vescale_rng.RandInt(low, high), dtype, generator)
    return born(
        "randint",
        tuple(size),
        make,
        device_mesh,
        placements,
        layout=layout,
        requires_grad=requires_grad,
        numbers=(low, high),
    )


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return the numbers from `start` (0 if only one is given) to `end`, exclusive, `step` apart.

    Integers equal those of `torch.arange` exactly, and so do floats that torch computes on one
    thread. Where torch splits a long range over threads, its rounding depends on their number.

    Raises:
        LayoutError: `step` is 0 or leads away from `end`.
    """
    if end is None:
        start, end = 0, start
    if step == 0 or (end - start) / step < 0:
        raise LayoutError(f"arange({start}, {end}, {step}): step does not lead from start to end")
    return born(
        "arange",
        (_range_length(start, end, step),),
        _ranged(start, end, step, dtype),
        device_mesh,
        placements,
        layout=layout,
        requires_grad=requires_grad,
        numbers=(start, end, step),
    )


def _range_length(start: float, end: float, step: float) -> int:
    """Return the number of elements of a range."""
    if all(isinstance(n, int) for n in (start, end, step)):
        # Integers without a detour over floats, which are exact up to 2**53 only.
        return int(-((start - end) // step))
    return ceil((end - start) / step)


def _ranged(start: float, end: float, step: float, dtype: torch.dtype | None) -> Make:
    """Return a `Make` that computes each box of the range by `torch.arange`."""
    numbers = all(isinstance(n, int) for n in (start, end, step))
    kind = dtype or (torch.int64 if numbers else torch.get_default_dtype())

    def stretch(low: int, high: int, count: int, device: torch.device) -> Tensor:
        """Elements `low` to `high` of the range of `count` elements, rounded as there."""
        first, after = low, high
        if kind.is_floating_point:
            # torch's kernel computes the first number of a vector and steps within it, so rounding
            # depends on the position in a vector: start and end where vectors of the full range
            # do.
            first = low // _RANGE_BLOCK * _RANGE_BLOCK
            after = min(count, -(-high // _RANGE_BLOCK) * _RANGE_BLOCK)
        # Half a step short of the next number, so that rounding neither adds a number nor loses
        # one.
        end = start + after * step if numbers else start + (after - 0.5) * step
        stretched = torch.arange(start + first * step, end, step, dtype=kind, device=device)
        return stretched[low - first : high - first]

    def make(layout: Layout, shape: Shape, device: torch.device) -> Tensor:
        local = torch.empty(local_shape(layout, shape), dtype=kind, device=device)
        # Interleaved and strided shards have several boxes, each a range of its own.
        for box in shard_layout(layout, shape, local).boxes:
            (low,), (extent,), at = box.global_offset, box.shape, box.local_offset
            local[at : at + extent] = stretch(low, low + extent, shape[0], device)
        return local

    return make
