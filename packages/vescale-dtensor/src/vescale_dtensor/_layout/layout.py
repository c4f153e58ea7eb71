"""Layouts: a mesh, one placement per mesh axis, and the order of the dims in memory.

Layouts hold no shape, so plans made for one batch size serve all others. They are interned: equal
layouts are the same object as long as the bounded table holds them, and compare equal also after it
has dropped them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.derived_placements import as_placement, on_dim
from vescale_dtensor._layout.mesh import describe, own_coordinate
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Partial, Replicate
from vescale_dtensor._layout.shard_geometry import dim_groups
from vescale_dtensor._torch.worlds import cached, note_world

Shape = tuple[int, ...]
Order = tuple[int, ...]


class Layout:
    """An immutable, interned layout. Make one with `Layout.of`.

    Attributes:
        mesh: the device mesh.
        placements: one per mesh axis, in mesh order; of two axes that shard one dim, the earlier is
            the outer one.
        order: dims of the global tensor from slowest to fastest in the memory of one device; None
            is row-major. Random numbers are drawn in this order.
        sizes: extent of each mesh axis.
        coordinate: this rank's coordinate; asking a rank outside of the mesh raises `MeshError`.
        inside: whether this rank is part of the mesh. A rank that is not holds nothing of a tensor:
            its local tensor has the shape (0,).
        active: bit mask of the mesh axes that have more than one coordinate.
        replicated, partial: bit masks of the active axes with such a placement.
    """

    __slots__ = (
        "_hash",
        "_words",
        "active",
        "coordinate",
        "inside",
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
        note_world()
        self.mesh = mesh
        self.placements = placements
        self.order = order
        self.sizes: tuple[int, ...] = tuple(mesh.shape)
        self.inside = mesh.get_coordinate() is not None
        # Outside, the slot stays empty: see `_LayoutOutside`.
        if self.inside:
            self.coordinate = own_coordinate(mesh)
        # Masks, as autograd and the fast path combine them at every call. Axes of one coordinate
        # are left out: on them all placements mean the same.
        self.active = bits(i for i, size in enumerate(self.sizes) if size > 1)
        self.replicated = self.active & bits(
            i for i, p in enumerate(placements) if isinstance(p, Replicate)
        )
        self.partial = self.active & bits(
            i for i, p in enumerate(placements) if isinstance(p, Partial)
        )
        # Computed once, since layouts are parts of all cache keys. By the mesh's identity (see
        # `ById`), which is not reused while this layout keeps the mesh alive.
        self._hash = hash((id(mesh), placements, order))
        self._words: str | None = None

    @staticmethod
    def of(mesh: DeviceMesh, placements: Sequence[object], order: Order | None = None) -> Layout:
        """Return the layout of these placements; torch's own are converted.

        Raises:
            LayoutError: the number of placements is not the number of mesh axes.
        """
        ours = tuple([as_placement(p) for p in placements])
        if len(ours) != mesh.ndim:
            raise LayoutError(
                f"{len(ours)} placements {list(ours)} for {describe(mesh)}: "
                f"give one per mesh axis, {mesh.ndim} in all"
            )
        return _interned(ById(mesh), ours, order)

    def with_placements(self, placements: Sequence[Placement]) -> Layout:
        """Return the layout of the same mesh and memory order with other placements."""
        wanted = tuple(placements)
        if wanted == self.placements:
            return self  # nearly always: plans keep operands where they are
        return _interned(ById(self.mesh), wanted, self.order)

    def with_order(self, order: Order | None) -> Layout:
        """Return the layout of the same mesh and placements with another memory order."""
        return self if order == self.order else _interned(ById(self.mesh), self.placements, order)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # Equal without being identical: the bounded table dropped one of them and made another.
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
        # Kept: the first call with each shape is described by it (`_tensor/lineage.py`).
        if self._words is None:
            order = "" if self.order is None else f", order={self.order}"
            self._words = f"Layout({describe(self.mesh)}, {list(self.placements)}{order})"
        return self._words


class _LayoutOutside(Layout):
    """The layout on a rank outside of the mesh: to ask for its coordinate is an error.

    A class of its own, since a class with `__getattr__` finds each of its slots three times as
    slowly, and every call that is planned reads dozens of a layout's.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # there, every other name would count as an attribute

        def __getattr__(self, name: str) -> Any:
            # Reached only where a slot is empty.
            if name == "coordinate":
                return own_coordinate(self.mesh)  # which raises
            raise AttributeError(name)


class ById:
    """A mesh as a key by identity, since an equal mesh may belong to destroyed process groups."""

    __slots__ = ("mesh",)

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.mesh is other.mesh

    def __hash__(self) -> int:
        # The key holds the mesh, so its id cannot be reused while the entry lives.
        return id(self.mesh)


# Bounded. A dropped layout lives on in the specs and caches that hold it.
@cached(8192)
def _interned(mesh: ById, placements: tuple[Placement, ...], order: Order | None) -> Layout:
    inside = mesh.mesh.get_coordinate() is not None
    return (Layout if inside else _LayoutOutside)(mesh.mesh, placements, order)


def bits(indices: object) -> int:
    """Return the bit mask of some indices."""
    mask = 0
    for index in indices:  # type: ignore[attr-defined]
        mask |= 1 << index
    return mask


def axes_in(mask: int) -> tuple[int, ...]:
    """Return the indices of the set bits, ascending."""
    return tuple([i for i in range(mask.bit_length()) if mask >> i & 1])


def normalized(placements: Sequence[object], ndim: int) -> tuple[Placement, ...]:
    """Convert placements to this package's, with non-negative dims.

    Raises:
        LayoutError: a dim that the tensor lacks, or shards that do not fit together.
    """
    ours = tuple([_checked(as_placement(p), ndim) for p in placements])
    # For its check alone: which flat and single shards may follow one another.
    dim_groups(ours, ndim)
    return ours


def _checked(placement: Placement, ndim: int) -> Placement:
    """Make the dims of one placement non-negative, after checking that the tensor has them."""
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
