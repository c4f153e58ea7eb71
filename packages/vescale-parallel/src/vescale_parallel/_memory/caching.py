"""Simulates torch's caching allocator: what an order would reserve of a device.

As of c10/cuda/CUDACachingAllocator.cpp, without streams and expandable segments: sizes in units of
512 bytes; small ones (up to 1 MiB) from segments of 2 MiB, larger ones from segments of 20 MiB, or
of their own from 10 MiB on; best fit, blocks are split and joined again within their segment.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vescale_parallel._memory.program import Program

_UNIT: Final = 512
_SMALL: Final = 2**20
_SMALL_SEGMENT: Final = 2 * 2**20
_SEGMENT: Final = 20 * 2**20
_LARGE: Final = 10 * 2**20
_ROUND: Final = 2 * 2**20


@dataclass
class _Piece:
    """A part of a segment."""

    size: int
    small: bool
    free: bool = False
    before: "_Piece | None" = None
    behind: "_Piece | None" = None


class CachingAllocator:
    """Counts the bytes that torch would have reserved of the device."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._pieces: dict[int, _Piece] = {}

    def allocate(self, size: int) -> _Piece | None:
        """Take bytes; nothing is taken for none."""
        if not size:
            return None
        size = -(-size // _UNIT) * _UNIT
        small = size <= _SMALL
        # Small and large blocks never share a segment, so that each pool is searched alone.
        pool = self._free[small]
        # Best fit. Of equally large ones torch takes that with the lowest address, this the one
        # with the lowest id.
        at = bisect.bisect_left(pool, (size, 0))
        if at < len(pool):
            piece = self._pieces.pop(pool.pop(at)[1])
        else:
            piece = _Piece(_segment(size), small)
            # Never less again: torch keeps segments until it runs out of memory, which is what is
            # asked here.
            self.reserved += piece.size
        piece.free = False
        left = piece.size - size
        # As the allocator does: what is left of a large block is cut off only where a large one
        # fits into it. Otherwise it is lost until the block comes back.
        if left >= _UNIT if small else left > _SMALL:
            rest = _Piece(left, small, before=piece, behind=piece.behind)
            if piece.behind is not None:
                piece.behind.before = rest
            piece.size, piece.behind = size, rest
            self._give(rest)
        return piece

    def free(self, piece: _Piece | None) -> None:
        """Give back what was taken, and join it with free neighbours."""
        if piece is None:
            return
        if piece.behind is not None and piece.behind.free:
            self._join(piece, self._taken(piece.behind))
        if piece.before is not None and piece.before.free:
            before = self._taken(piece.before)
            self._join(before, piece)
            piece = before
        self._give(piece)

    def _give(self, piece: _Piece) -> None:
        piece.free = True
        self._pieces[id(piece)] = piece
        bisect.insort(self._free[piece.small], (piece.size, id(piece)))

    def _taken(self, piece: _Piece) -> _Piece:
        self._free[piece.small].remove((piece.size, id(piece)))
        return self._pieces.pop(id(piece))

    def _join(self, first: _Piece, second: _Piece) -> None:
        first.size += second.size
        first.behind = second.behind
        if second.behind is not None:
            second.behind.before = first


def _segment(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _SEGMENT if size < _LARGE else -(-size // _ROUND) * _ROUND


def reserved(of: Program, order: Sequence[int]) -> int:
    """Bytes that torch's caching allocator would reserve for an order of a program."""
    allocator = CachingAllocator()
    makes: list[list[int]] = [[] for _ in range(len(of))]
    for at, storage in enumerate(of.storages):
        makes[storage.maker].append(at)
    pieces: dict[int, _Piece | None] = {}
    left = [len(storage.users) for storage in of.storages]
    for operation in order:
        for at in makes[operation]:
            pieces[at] = allocator.allocate(of.storages[at].bytes)
        # After the results, as kernels do: they allocate those first.
        allocator.free(allocator.allocate(of.operations[operation].temporary))
        for at in of.touched[operation]:
            left[at] -= 1
            if not left[at] and not of.storages[at].kept:
                allocator.free(pieces.pop(at))
    return allocator.reserved
