"""A layout: a mesh, one placement per mesh axis, and the order of the dims in memory.

Layouts hold no shape, so that plans made for one batch size serve all others. They are interned:
equal layouts are the same object wherever the bounded table still holds them, and compare equal
also where it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._layout.mesh import Coordinate, axis_names, describe, own_coordinate
from vescale_dtensor._layout.placements import (
    Interval,
    Partial,
    Placement,
    Replicate,
    Sharded,
    as_placement,
    moved,
)
from vescale_dtensor._layout.shard_geometry import Box, Group, check_fits, dim_groups, held

Shape = tuple[int, ...]
Order = tuple[int, ...]


class Layout:
    """An immutable, interned layout. Make one with `Layout.of`.

    Attributes:
        mesh: the device mesh.
        placements: one per mesh axis, in mesh order; an earlier axis cuts a dim first.
        order: dims of the global tensor from slowest to fastest in the memory of one device, or
            None for row-major. Random numbers are laid out in this order.
        sizes: extent of each mesh axis.
        coordinate: of this rank.
        active: bit mask of the mesh axes that have more than one coordinate.
        replicated, partial: bit masks of the active axes with such a placement.
    """

    __slots__ = (
        "_hash",
        "active",
        "coordinate",
        "mesh",
        "order",
        "partial",
        "placements",
        "replicated",
        "sizes",
    )

    def __init__(
        self, mesh: DeviceMesh, placements: tuple[Placement, ...], order: Order | None
    ) -> None:
        self.mesh = mesh
        self.placements = placements
        self.order = order
        self.sizes: tuple[int, ...] = tuple(mesh.shape)
        self.coordinate = own_coordinate(mesh)
        self.active = bits(i for i, size in enumerate(self.sizes) if size > 1)
        self.replicated = self.active & bits(
            i for i, p in enumerate(placements) if isinstance(p, Replicate)
        )
        self.partial = self.active & bits(
            i for i, p in enumerate(placements) if isinstance(p, Partial)
        )
        self._hash = hash((id(mesh), placements, order))

    @staticmethod
    def of(mesh: DeviceMesh, placements: Sequence[object], order: Order | None = None) -> Layout:
        """The layout of these placements.

        Raises:
            LayoutError: the number of placements is not the number of mesh axes.
        """
        ours = tuple(as_placement(p) for p in placements)
        if len(ours) != mesh.ndim:
            raise LayoutError(
                f"{len(ours)} placements {list(ours)} for {describe(mesh)}: "
                f"give one per mesh axis, {mesh.ndim} in all"
            )
        return _interned(ById(mesh), ours, order)

    def with_placements(self, placements: Sequence[Placement]) -> Layout:
        """The same mesh and memory order, other placements."""
        return _interned(ById(self.mesh), tuple(placements), self.order)

    def with_order(self, order: Order | None) -> Layout:
        """The same mesh and placements, another memory order."""
        return self if order == self.order else _interned(ById(self.mesh), self.placements, order)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Layout)
            and self._hash == other._hash
            and self.placements == other.placements
            and self.order == other.order
            and self.mesh is other.mesh
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        order = "" if self.order is None else f", order={self.order}"
        return f"Layout({describe(self.mesh)}, {list(self.placements)}{order})"


class ById:
    """A mesh as a key: by identity, since an equal mesh may belong to process groups long gone."""

    __slots__ = ("mesh",)

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.mesh is other.mesh

    def __hash__(self) -> int:
        return id(self.mesh)


@lru_cache(maxsize=8192)
def _interned(mesh: ById, placements: tuple[Placement, ...], order: Order | None) -> Layout:
    return Layout(mesh.mesh, placements, order)


def bits(indices: object) -> int:
    """Bit mask of some indices."""
    mask = 0
    for index in indices:  # type: ignore[attr-defined]
        mask |= 1 << index
    return mask


def axes_in(mask: int) -> tuple[int, ...]:
    """Indices of the set bits, ascending."""
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


def normalized(placements: Sequence[object], ndim: int) -> tuple[Placement, ...]:
    """Ours, with non-negative dims.

    Raises:
        LayoutError: a dim that the tensor lacks, or cuts that do not go together.
    """
    ours = tuple(_checked(as_placement(p), ndim) for p in placements)
    dim_groups(ours, ndim)
    return ours


def _checked(placement: Placement, ndim: int) -> Placement:
    if not isinstance(placement, Sharded):
        return placement
    for dim in placement.cut_dims():
        if not -ndim <= dim < ndim:
            raise LayoutError(
                f"{placement}: the tensor has {ndim} dims, so there is no dim {dim}; "
                f"use {-ndim} to {ndim - 1}"
                if ndim
                else f"{placement}: the tensor has 0 dims, so nothing can be cut; use Replicate()"
            )
    return moved(placement, placement.cut_dims()[0] % ndim)


@lru_cache(maxsize=8192)
def held_groups(layout: Layout, shape: Shape) -> tuple[Group, ...]:
    """What this rank holds of a tensor of global `shape`, group of dims by group of dims.

    Raises:
        LayoutError: a cut that does not fit the shape, on whichever rank.
    """
    check_fits(layout.placements, layout.sizes, shape)
    return held(layout.placements, layout.sizes, shape, layout.coordinate)


@lru_cache(maxsize=8192)
def local_shape(layout: Layout, shape: Shape) -> Shape:
    """Shape of the piece that this rank holds; dims that are cut as one are one dim of it."""
    return tuple(group.extent for group in held_groups(layout, shape))


def local_interval(layout: Layout, shape: Shape, dim: int) -> Interval:
    """The indices of one dim that this rank holds, where they are an interval; others may not be.

    Raises:
        UnsupportedError: they are not.
    """
    for group in held_groups(layout, shape):
        if group.dims == (dim,) and len(group.runs[0]) == 1:
            return group.runs[0][0]
    raise UnsupportedError(
        f"what {layout} gives a rank of dim {dim} of {list(shape)} is no interval; redistribute to "
        "Shard() first"
    )


def box_of(layout: Layout, shape: Shape, coordinate: Coordinate) -> Box:
    """The part of a tensor of global `shape` at `coordinate`, where that is one box.

    Raises:
        UnsupportedError: a placement for which it may be several (see `is_interval`).
    """
    groups = held(layout.placements, layout.sizes, shape, coordinate)
    return _one_box(groups, layout, shape)


def _one_box(groups: tuple[Group, ...], layout: Layout, shape: Shape) -> Box:
    if any(len(group.dims) > 1 or len(group.runs[0]) > 1 for group in groups):
        raise UnsupportedError(
            f"what {layout} gives a rank of {list(shape)} is not one box of the tensor; "
            "redistribute to Shard() first"
        )
    return tuple(group.runs[0][0] for group in groups)


def box_shape(box: Box) -> Shape:
    """Extents of a box."""
    return tuple(high - low for low, high in box)


def strides_of(shape: Shape, order: Order | None) -> Shape:
    """Strides of a dense tensor whose dims lie in memory in `order` (None: row-major)."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order if order is not None else range(len(shape))):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def order_of(shape: Shape, strides: Sequence[int]) -> Order | None:
    """The memory order that strides express; None where it is row-major.

    Dims of extent one have no place in memory: they keep their place among the others.
    """
    real = [d for d in range(len(shape)) if shape[d] != 1]
    ordered = sorted(real, key=lambda d: (-strides[d], d))
    if ordered == real or prod(shape) == 0:
        return None
    places = iter(ordered)
    return tuple(d if shape[d] == 1 else next(places) for d in range(len(shape)))


class TensorMeta:
    """What the C++ constructor of a wrapper reads: global shape, strides, dtype."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, shape: torch.Size, stride: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.stride = stride
        self.dtype = dtype


class Spec:
    """A layout with the global shape and dtype: all that a wrapper knows besides its data.

    Attributes:
        is_reduced: whether this is the twin that `reduced` gives.
        itself: the spec that it is the twin of, or this one.
        has_gaps: whether one device would hold it with gaps between its elements: a view of some
            columns, say. `contiguous()` of that is a copy, wherever the pieces lie here.
    """

    __slots__ = (
        "_reduced",
        "has_gaps",
        "is_reduced",
        "itself",
        "layout",
        "ndim",
        "shape",
        "tensor_meta",
    )

    def __init__(
        self,
        layout: Layout,
        shape: torch.Size,
        dtype: torch.dtype,
        strides: Shape | None = None,
    ) -> None:
        self.layout = layout
        self.shape = shape
        self.ndim = len(shape)
        self.has_gaps = strides is not None
        dense = strides_of(shape, layout.order) if strides is None else strides
        self.tensor_meta = TensorMeta(shape, dense, dtype)
        self._reduced: Spec | None = None
        self.itself = self
        self.is_reduced = False

    @property
    def reduced(self) -> Spec:
        """The same spec, of a tensor whose total is known (see `_remembered`).

        Another object, so that no route for tensors that still have to be summed is followed.
        """
        if self._reduced is None:
            strides = self.tensor_meta.stride if self.has_gaps else None
            twin = Spec(self.layout, self.shape, self.tensor_meta.dtype, strides)
            twin.itself, twin.is_reduced = self, True
            twin._reduced, self._reduced = twin, twin
        return self._reduced

    def __repr__(self) -> str:
        return f"Spec({short(self.shape, self.tensor_meta.dtype, self.layout)})"


@lru_cache(maxsize=16384)
def spec_of(layout: Layout, shape: Shape, dtype: torch.dtype) -> Spec:
    """The spec of a tensor: interned, bounded."""
    return Spec(layout, torch.Size(shape), dtype)


@lru_cache(maxsize=4096)
def with_strides(spec: Spec, strides: Shape) -> Spec:
    """The spec of a view that has these strides on one device."""
    usual = spec.tensor_meta.stride
    lies = [s for s, n in zip(strides, spec.shape, strict=True) if n != 1]
    wanted = [s for s, n in zip(usual, spec.shape, strict=True) if n != 1]
    if lies == wanted or prod(spec.shape) == 0:
        return spec
    return Spec(spec.layout, spec.shape, spec.tensor_meta.dtype, strides)


def short(shape: Sequence[int], dtype: torch.dtype, layout: Layout) -> str:
    """The short global form: `f32[8@dp, 4@tp], +cp` (sharded dims, then what is partial)."""
    dims = [str(extent) for extent in shape]
    partial = ""
    for group in dim_groups(layout.placements, len(dims)):
        if len(group) > 1:
            dims[group[0]], dims[group[-1]] = f"({dims[group[0]]}", f"{dims[group[-1]]})"
    for name, placement in zip(axis_names(layout.mesh), layout.placements, strict=True):
        if isinstance(placement, Sharded):
            dims[placement.cut_dims()[-1]] += f"@{name}"
        elif isinstance(placement, Partial):
            sign = "+" if placement.reduce_op == "sum" else f"{placement.reduce_op}:"
            partial += f", {sign}{name}"
    return f"{short_dtype(dtype)}[{', '.join(dims)}]{partial}"


def short_dtype(dtype: torch.dtype) -> str:
    """`f32` for torch.float32, and so on."""
    return _SHORT_DTYPE.get(dtype, str(dtype).removeprefix("torch."))


_SHORT_DTYPE = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
