"""The ranks among which the rows of the global batch are divided, and what they tell each other."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_rng._errors import LayoutError
from vescale_rng._state.agreement import gather_numbers


@dataclass(frozen=True, eq=False)
class DataAxes:
    """One or several axes, as seen from this rank.

    Attributes:
        groups: a process group for each axis, from slow to fast: the rows of the ranks of the last
            one are neighbours.
        ranks: the global ranks in the order of their rows, this rank among them.
        index: this rank's place in that order.
    """

    groups: tuple[Any, ...]
    ranks: tuple[int, ...]
    index: int

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return what each rank gives, in the order of rows. Every rank must call it.

        Args:
            values: integers below 2**63, equally many on every rank.
        """
        # Axis by axis, so that several axes need no process group of their own.
        found = [*values]
        for group in reversed(self.groups):
            found = [number for row in gather_numbers(found, group) for number in row]
        size = len(values)
        return [tuple(found[at : at + size]) for at in range(0, len(found), size)]

    def places(self, mesh: DeviceMesh) -> bool:
        """Tell whether a mesh includes these axes, so that a DTensor on it is global already.

        Raises:
            LayoutError: it includes a part of them only.
        """
        # Asked for each DTensor that is drawn, and flattening a mesh takes longer than the draw.
        known = _included.setdefault(mesh, {})
        if self.ranks not in known:
            known[self.ranks] = _includes(mesh, self.ranks)
        return known[self.ranks]

    def others(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """Return the dims of a mesh along which the batch is not divided."""
        known = _others.setdefault(mesh, {})
        if self.ranks not in known:
            known[self.ranks] = _not_among(mesh, self.ranks)
        return known[self.ranks]


# Weakly: a mesh that is kept keeps its process groups, also after they were destroyed.
_included: "weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[int, ...], bool]]" = (
    weakref.WeakKeyDictionary()
)
_others: "weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[int, ...], tuple[int, ...]]]" = (
    weakref.WeakKeyDictionary()
)


def _includes(mesh: DeviceMesh, ranks: tuple[int, ...]) -> bool:
    # By ranks, not by names: a mesh that was sliced or made anew is still the same ranks.
    common = set(mesh.mesh.flatten().tolist()) & set(ranks)
    if common == set(ranks):
        return True
    # This rank alone: the mesh has other axes only.
    if len(common) == 1:
        return False
    raise LayoutError(
        f"a DTensor lies on the ranks {mesh.mesh.flatten().tolist()}, and consistent() was told "
        f"that the data axes are the ranks {list(ranks)}: only some of them are in its mesh, so "
        "whether its rows are those of the global batch cannot be known. Name in `data` the axes "
        "that divide the batch, all of them and no others"
    )


def _not_among(mesh: DeviceMesh, ranks: tuple[int, ...]) -> tuple[int, ...]:
    here = mesh.get_coordinate()
    if here is None:
        return ()
    dims = range(mesh.ndim)
    lines = [tuple(slice(None) if dim == d else here[d] for d in dims) for dim in dims]
    return tuple(d for d in dims if not set(mesh.mesh[lines[d]].tolist()) <= set(ranks))


def data_axes(data: Any) -> DataAxes:
    """Read what `consistent(data=...)` was given.

    Args:
        data: a `DeviceMesh` of one dim or more, a process group, or several of these from slow to
            fast.

    Raises:
        LayoutError: it is none of these, or this rank is not in it.
    """
    # A mesh is no list of its axes, though it can be indexed by their names.
    parts = list(data) if isinstance(data, (tuple, list)) else [data]
    if not parts:
        raise LayoutError("data=() names no axis: write data=None where no axis divides the batch")
    axes = [axis for part in parts for axis in _axes_of(part)]
    groups = tuple(group for group, _ in axes)
    # A rank outside of the axes has no place among the rows, and would not be asked.
    for group in groups:
        if dist.get_rank(group) < 0:
            raise LayoutError(f"rank {dist.get_rank()} is in none of the data axes {data}")
    # Row-major over the axes, as `gather` concatenates and as FSDP2 numbers its ranks.
    index = 0
    for group in groups:
        index = index * dist.get_world_size(group) + dist.get_rank(group)
    if len(parts) == 1:
        return DataAxes(groups, axes[0][1], index)
    # Meshes of several dims that are given apart say nothing of each other's ranks.
    alone = DataAxes(groups, (), index)
    ranks = tuple(rank for (rank,) in alone.gather([dist.get_rank()]))
    if len(set(ranks)) != prod(dist.get_world_size(group) for group in groups):
        raise LayoutError(f"data={data} names ranks twice: {ranks}")
    return DataAxes(groups, ranks, index)


def _axes_of(part: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Return (group, ranks of all of the part) for each axis of a mesh, or for a group."""
    if isinstance(part, DeviceMesh):
        ranks = tuple(part.mesh.flatten().tolist())
        return [(part.get_group(dim), ranks) for dim in range(part.ndim)]
    if isinstance(part, dist.ProcessGroup):
        return [(part, tuple(dist.get_process_group_ranks(part)))]
    raise LayoutError(
        f'consistent(data=...) takes a DeviceMesh (mesh["dp"]), a process group, or several of '
        f"them, got {type(part).__name__}: {part!r}"
    )
