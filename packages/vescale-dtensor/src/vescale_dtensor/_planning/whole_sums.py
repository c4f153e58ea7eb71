"""Mesh axes whose ragged shards are never summed: such sums have bits that follow the ranks.

A norm of a tensor whose elements are stored on n ranks is a sum of n parts, and other n give other
bits. Who needs the same bits on any number of ranks says so here, and sums are taken of whole
tensors: one all-gather in place of an all-reduce of one number.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import MeshError
from vescale_dtensor._layout.mesh import describe
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Partial, RaggedShard

# By identity, as layouts know meshes, and weakly: an entry ends with its mesh.
_axes: dict[int, tuple[weakref.ref[Any], frozenset[int]]] = {}

_EXACT: Final = ("max", "min")
"""Reductions that give the same bits in any order."""


def note(mesh: DeviceMesh, axes: Sequence[str]) -> bool:
    """Keep the axes; returns whether one of them is new.

    Raises:
        MeshError: the mesh has no axis of such a name.
    """
    names = mesh.mesh_dim_names or ()
    missing = [axis for axis in axes if axis not in names]
    if missing:
        raise MeshError(f"sum_whole: {describe(mesh)} has no axis {missing[0]!r}")
    before = of(mesh)
    now = before | {names.index(axis) for axis in axes}
    key = id(mesh)
    _axes[key] = weakref.ref(mesh, lambda _: _axes.pop(key, None)), now
    return now != before


def of(mesh: DeviceMesh) -> frozenset[int]:
    """The axes of a mesh, by index."""
    found = _axes.get(id(mesh))
    return found[1] if found is not None and found[0]() is mesh else frozenset()


def sums_ragged_shards(
    actual: Sequence[Placement], inputs: Sequence[Placement], outputs: Sequence[Placement]
) -> bool:
    """Whether what an op would do on one axis adds up what ragged shards hold.

    Args:
        actual: placements of the operands as they are.
        inputs: as the op would take them: a ragged shard may become an even one first.
        outputs: of its results.
    """
    sharded = any(isinstance(p, Sharded) for p in inputs)
    if not sharded or not any(isinstance(p, RaggedShard) for p in actual):
        return False
    # Neither sharded nor partial: the op itself has combined what the ranks hold.
    return any(
        p.reduce_op not in _EXACT if isinstance(p, Partial) else not isinstance(p, Sharded)
        for p in outputs
    )
