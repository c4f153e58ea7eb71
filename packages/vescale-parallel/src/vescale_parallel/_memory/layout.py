"""Places storages in one block of memory, by rules and by HiGHS, before anything runs.

The order is fixed, so each storage has a lifetime; two whose lifetimes meet may not overlap in
addresses. No layout is below the most bytes that live at once.
"""

import bisect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vescale_parallel._errors import MemoryPlanError
from vescale_parallel._memory.highs import highs_layout

_PAIRS: Final = 1500  # of storages that live together: what HiGHS is asked at most


@dataclass(frozen=True)
class Block:
    """Bytes that are needed from one step to another, both included."""

    bytes: int
    first: int
    last: int

    def meets(self, other: "Block") -> bool:
        """Whether some step needs both."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class ArenaLayout:
    """Offsets of blocks.

    Attributes:
        offsets: of each block, in bytes.
        size: bytes of memory that hold all.
        lower_bound: bytes that live at once, below which no layout is.
        sizes: what each way that was tried needs, by its name.
    """

    offsets: tuple[int, ...]
    size: int
    lower_bound: int
    sizes: dict[str, int]


def aligned(size: int, alignment: int) -> int:
    """Bytes, rounded up to whole units."""
    return -(-size // alignment) * alignment


def laid_out(blocks: Sequence[Block], *, deadline: float, highs: bool) -> ArenaLayout:
    """Find offsets; `highs` lets scipy's HiGHS improve on the rules where there are few blocks."""
    floor = most_at_once(blocks)
    best: tuple[int, tuple[int, ...]] | None = None
    sizes: dict[str, int] = {}
    for name, order in _orders(blocks):
        found = _best_fit(blocks, order)
        size = _size(blocks, found)
        sizes[name] = min(size, sizes.get(name, size))
        if best is None or size < best[0]:
            best = size, found
        # No layout is smaller: the other rules are spared.
        if size <= floor:
            break
    size, offsets = best or (0, ())
    size, offsets = _raised(blocks, size, offsets, floor, deadline)
    if size < min(sizes.values(), default=size):
        sizes["tops first"] = size
    if highs and size > floor:
        # HiGHS gets a binary for each pair, so its time grows with them and not with blocks.
        pairs = list(_pairs(blocks))
        if len(pairs) <= _PAIRS:
            solved = highs_layout([one.bytes for one in blocks], pairs, size, deadline)
            if solved is not None and _size(blocks, solved) < size:
                size, offsets = _size(blocks, solved), solved
                sizes["HiGHS"] = size
    # Whoever found it: a layout that overlaps would give wrong numbers without an error.
    checked_layout(blocks, offsets, size)
    return ArenaLayout(offsets, size, floor, sizes)


def most_at_once(blocks: Sequence[Block]) -> int:
    """The most bytes that are needed at one step."""
    changes: dict[int, int] = {}
    for one in blocks:
        changes[one.first] = changes.get(one.first, 0) + one.bytes
        # Behind its last step, in which it is still there.
        changes[one.last + 1] = changes.get(one.last + 1, 0) - one.bytes
    live = most = 0
    for step in sorted(changes):
        live += changes[step]
        most = max(most, live)
    return most


def checked_layout(blocks: Sequence[Block], offsets: Sequence[int], size: int) -> None:
    """Make sure that no two blocks overlap in addresses and in time, and that all lie inside.

    Raises:
        MemoryPlanError: they do.
    """
    if len(offsets) != len(blocks):
        raise MemoryPlanError(f"a layout has {len(offsets)} offsets for {len(blocks)} blocks.")
    if any(at < 0 or at + one.bytes > size for one, at in zip(blocks, offsets, strict=True)):
        raise MemoryPlanError(f"a layout of {size} bytes has a block outside of it.")
    for one, other in _pairs(blocks):
        below = offsets[one] + blocks[one].bytes <= offsets[other]
        if not below and offsets[other] + blocks[other].bytes > offsets[one]:
            raise MemoryPlanError(f"a layout has blocks {one} and {other} overlap.")


def _pairs(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """Pairs of blocks with bytes that live together."""
    active: list[int] = []
    for at in sorted(range(len(blocks)), key=lambda one: blocks[one].first):
        if not blocks[at].bytes:
            continue
        # By their first step, so that those that have ended meet none of the later ones.
        active = [one for one in active if blocks[one].last >= blocks[at].first]
        for one in active:
            yield one, at
        active.append(at)


def _size(blocks: Sequence[Block], offsets: Sequence[int]) -> int:
    ends = (at + one.bytes for one, at in zip(blocks, offsets, strict=True))
    return max(ends, default=0)


def _orders(blocks: Sequence[Block]) -> Iterator[tuple[str, list[int]]]:
    def lives(at: int) -> int:
        return blocks[at].last - blocks[at].first + 1

    every = range(len(blocks))
    # No rule is best on all graphs. Largest first mostly is, and lets the others be spared.
    yield "largest first", sorted(every, key=lambda at: (-blocks[at].bytes, -lives(at)))
    yield "longest first", sorted(every, key=lambda at: (-lives(at), -blocks[at].bytes))
    yield "area first", sorted(every, key=lambda at: -lives(at) * blocks[at].bytes)
    yield "as they come", sorted(every, key=lambda at: (blocks[at].first, -blocks[at].bytes))


def _best_fit(blocks: Sequence[Block], order: Sequence[int]) -> tuple[int, ...]:
    """Place each block in the smallest gap that holds it, among those it meets."""
    offsets = [0] * len(blocks)
    placed: list[tuple[int, int]] = []  # (offset, block), ascending
    for at in order:
        block = blocks[at]
        if not block.bytes:
            continue
        top, best, gap = 0, -1, 0
        for offset, other in placed:
            # In another time: the same addresses may be used.
            if not block.meets(blocks[other]):
                continue
            room = offset - top
            if room >= block.bytes and (best < 0 or room < gap):
                best, gap = top, room
            top = max(top, offset + blocks[other].bytes)
        offsets[at] = top if best < 0 else best
        bisect.insort(placed, (offsets[at], at))
    return tuple(offsets)


def _raised(
    blocks: Sequence[Block], size: int, offsets: tuple[int, ...], floor: int, deadline: float
) -> tuple[int, tuple[int, ...]]:
    """Place what lies above the lower bound earlier, again and again."""
    order = sorted(range(len(blocks)), key=lambda at: -blocks[at].bytes)
    # Tries since the last that was better: they may go round in circles.
    tried, now = 0, offsets
    while size > floor and tried < 30 and time.monotonic() < deadline:
        # What sticks out was placed late, when the gaps were gone: it goes first in the next try.
        above = {at for at in order if now[at] + blocks[at].bytes > floor}
        order = [at for at in order if at in above] + [at for at in order if at not in above]
        now = _best_fit(blocks, order)
        tried += 1
        if _size(blocks, now) < size:
            size, offsets, tried = _size(blocks, now), now, 0
    return size, offsets
