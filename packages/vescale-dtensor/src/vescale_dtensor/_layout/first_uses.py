"""Counts of the first calls of each kind on a mesh, which compare what the ranks pass.

A comparison is a collective, so all ranks of a mesh have to count alike. They do, because each mesh
has counts of its own, with a bound of its own: its members make the same calls on it, whereas the
calls on other meshes, such as those of one pipeline stage, differ from rank to rank. No entry is
dropped while its mesh lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from torch.distributed.device_mesh import DeviceMesh


class FirstUses:
    """Counts calls of each kind on each mesh, up to a number.

    Args:
        first: how many calls of a kind are counted.
        most_kinds: kinds on one mesh beyond this number are never counted, which bounds the memory.
    """

    def __init__(self, first: int, most_kinds: int) -> None:
        self._first = first
        self._most_kinds = most_kinds
        # By identity, since an equal mesh may belong to destroyed process groups. The reference
        # tells a mesh from a later one that was given the same id.
        self._meshes: dict[int, tuple[weakref.ref[DeviceMesh], dict[Hashable, int]]] = {}

    def is_over(self, mesh: DeviceMesh, kind: Hashable) -> bool:
        """Return whether further calls of this kind are not counted. Equal on every rank."""
        counts = self._counts(mesh)
        count = counts.get(kind, 0)
        return count >= self._first or (count == 0 and len(counts) >= self._most_kinds)

    def add(self, mesh: DeviceMesh, kind: Hashable) -> None:
        """Count a call."""
        counts = self._counts(mesh)
        counts[kind] = counts.get(kind, 0) + 1

    def clear(self) -> None:
        """Forget all counts."""
        self._meshes.clear()

    def _counts(self, mesh: DeviceMesh) -> dict[Hashable, int]:
        known = self._meshes.get(id(mesh))
        if known is not None and known[0]() is mesh:
            return known[1]
        # Only when a mesh is new: counts of meshes that are gone go, too.
        for key in [key for key, (alive, _) in list(self._meshes.items()) if alive() is None]:
            self._meshes.pop(key, None)
        counts: dict[Hashable, int] = {}
        self._meshes[id(mesh)] = weakref.ref(mesh), counts
        return counts
