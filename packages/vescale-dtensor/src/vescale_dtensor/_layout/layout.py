"""A layout: a mesh, one placement per mesh axis, and the order of the dims in memory.

Layouts hold no shape, so that plans made for one batch size serve all others. They are interned:
equal layouts are the same object wherever the bounded table still holds them, and compare equal
also where it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.mesh import describe, own_coordinate
from vescale_dtensor._layout.placements import (
    Partial,
    Placement,
    Replicate,
    Sharded,
    as_placement,
    on_dim,
)
from vescale_dtensor._layout.shard_geometry import dim_groups

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
    return on_dim(placement, placement.cut_dims()[0] % ndim)
