"""Spellings of one mesh: the same lines of ranks, with the axes in another order or renamed.

ZeRO stores parameters on (tp, dp) where activations are on (dp, tp), say. To users that is one
mesh: most layouts mean the same elements on each rank in both, and nothing has to be sent.
"""

from __future__ import annotations

from itertools import combinations, permutations

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Replicate, is_flat
from vescale_dtensor._torch.worlds import cached

AxisMap = tuple[int | None, ...]
"""For each axis of one mesh, that of the other along the same ranks; None: an axis of one rank."""


@cached(256)
def axes_between(mesh: DeviceMesh, other: DeviceMesh) -> AxisMap | None:
    """For each axis of `mesh` that of `other`; None where they are not spellings of one mesh."""
    if mesh is other or mesh == other:
        return tuple(range(mesh.ndim))
    if mesh.device_type != other.device_type:
        return None
    own, theirs = _long_axes(mesh), _long_axes(other)
    ranks, others = mesh.mesh.squeeze(), other.mesh.squeeze()
    for order in permutations(range(len(theirs))):
        turned = others.permute(order)
        if turned.shape == ranks.shape and bool((turned == ranks).all()):
            found = {axis: theirs[at] for axis, at in zip(own, order, strict=True)}
            return tuple([found.get(axis) for axis in range(mesh.ndim)])
    return None


def _long_axes(mesh: DeviceMesh) -> list[int]:
    return [axis for axis, size in enumerate(mesh.shape) if size > 1]


@cached(4096)
def respelled(layout: Layout, mesh: DeviceMesh) -> Layout | None:
    """The layout on `mesh` in which every rank holds the same; None if there is none."""
    axes = axes_between(mesh, layout.mesh)
    if axes is None or _is_flattened_by_one_rank(layout):
        return None
    # Of axes that shard the same dims the earlier one is the outer one, on either mesh.
    place = {axis: at for at, axis in enumerate(axes)}
    for one, other in combinations([axis for axis in axes if axis is not None], 2):
        turned = (place[one] < place[other]) != (one < other)
        if turned and _share_dims(layout.placements[one], layout.placements[other]):
            return None
    return Layout.of(mesh, _on_axes(layout.placements, axes), layout.order)


def nearest(layout: Layout, mesh: DeviceMesh) -> Layout:
    """A layout on another spelling of the mesh, as close as it can be: shards stay where they fit.

    Args:
        layout: one that `respelled` has no answer for.
        mesh: the other spelling.
    """
    # Before shards of single dims there can be none of several dims as one.
    kept = tuple([Replicate() if is_flat(p) else p for p in layout.placements])
    axes = axes_between(mesh, layout.mesh)
    assert axes is not None
    return Layout.of(mesh, _on_axes(kept, axes), layout.order)


def _on_axes(placements: tuple[Placement, ...], axes: AxisMap) -> list[Placement]:
    return [Replicate() if axis is None else placements[axis] for axis in axes]


def _is_flattened_by_one_rank(layout: Layout) -> bool:
    """Whether an axis of one rank makes one local dim of several: the other mesh may lack it."""
    pairs = zip(layout.placements, layout.sizes, strict=True)
    return any(size == 1 and is_flat(placement) for placement, size in pairs)


def _share_dims(one: Placement, other: Placement) -> bool:
    if not (isinstance(one, Sharded) and isinstance(other, Sharded)):
        return False
    return not set(one.cut_dims()).isdisjoint(other.cut_dims())
