"""Branch and bound over the order of a few items: best first by peak, with what is proven.

What lives after a set of items has run does not depend on their order, so the search walks sets,
not orders. An item that frees at least what it makes, and passes no peak that is there anyway,
runs at once: moving it earlier in any order raises nothing. On training graphs that leaves few
sets to look at.
"""

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vescale_parallel._memory.simulation import PrefixState


@dataclass(frozen=True)
class _Part:
    """Operations of an item up to where what is freed depends on what has run before.

    Attributes:
        rise: bytes added at most while they run.
        net: bytes added once they have run.
        frees: bytes that are freed at their end where all of a mask of items have run.
    """

    rise: int
    net: int
    frees: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SearchResult:
    """What a search ends with.

    Attributes:
        items: the best order that is better than what was asked to be beaten; None if none is.
        peak: its peak, or the one to be beaten.
        proven: whether no order of these items has a lower one.
    """

    items: tuple[int, ...] | None
    peak: int
    proven: bool


class Items:
    """Groups of operations to be ordered after a prefix, each group in its own fixed order."""

    def __init__(self, running: PrefixState, groups: Sequence[Sequence[int]]) -> None:
        self.of, self.groups = running.of, groups
        self.live = running.live
        item = {operation: at for at, group in enumerate(groups) for operation in group}
        self.needs = [0] * len(groups)
        self.later: list[set[int]] = [set() for _ in groups]
        for operation, at in item.items():
            for one in self.of.before[operation]:
                if one in item and item[one] != at:
                    self.needs[at] |= 1 << item[one]
                    self.later[item[one]].add(at)
        # Those that something behind the items touches are not among them: nothing here frees
        # them.
        self._users: dict[int, int] = {}  # by storage: the items that touch it, where they free it
        for storage in {at for one in item for at in self.of.touched[one]}:
            self._mask(storage, item, running)
        self.parts = [tuple(self._parts(at)) for at in range(len(groups))]

    def _mask(self, storage: int, item: dict[int, int], running: PrefixState) -> None:
        one, mask = self.of.storages[storage], 0
        if one.kept:
            return
        for user in one.users:
            if user in item:
                mask |= 1 << item[user]
            elif not running.has_run(user):
                return  # it is touched after all items
        self._users[storage] = mask

    def _parts(self, at: int) -> list[_Part]:
        last: dict[int, int] = {}
        for operation in self.groups[at]:
            last.update(dict.fromkeys(self.of.touched[operation], operation))
        parts: list[_Part] = []
        live = rise = 0
        for operation in self.groups[at]:
            live += self.of.made[operation]
            rise = max(rise, live + self.of.operations[operation].temporary)
            frees = []
            for storage in self.of.touched[operation]:
                if last[storage] != operation or storage not in self._users:
                    continue
                # Freed here only if the other items that touch it have run, so that a part ends:
                # how high the rest of the item rises depends on them.
                others = self._users[storage] & ~(1 << at)
                if others:
                    frees.append((others, self.of.storages[storage].bytes))
                else:
                    live -= self.of.storages[storage].bytes
            if frees:
                parts.append(_Part(rise, live, tuple(frees)))
                live = rise = 0
        if live or rise or not parts:
            parts.append(_Part(rise, live, ()))
        return parts

    def cost(self, at: int, done: int) -> tuple[int, int]:
        """Bytes that an item adds while it runs and once it has, after the items in a mask."""
        live = rise = 0
        for part in self.parts[at]:
            rise = max(rise, live + part.rise)
            live += part.net
            for others, freed in part.frees:
                if others & ~done == 0:
                    live -= freed
        return rise, live

    def grows(self, at: int) -> tuple[int, int]:
        """Bytes that the operations of an item make, and their temporary bytes."""
        made = sum(self.of.made[one] for one in self.groups[at])
        return made, max(self.of.operations[one].temporary for one in self.groups[at])

    def freed(self) -> Iterator[tuple[list[int], int]]:
        """Items after which a storage is freed, and its bytes."""
        for storage, mask in self._users.items():
            yield list(members(mask)), self.of.storages[storage].bytes

    def peak(self, order: Sequence[int]) -> int | None:
        """The peak of the items in an order; None if it is no order of them."""
        done, live, peak = 0, self.live, self.live
        for at in order:
            if self.needs[at] & ~done or done >> at & 1:
                return None
            rise, net = self.cost(at, done)
            peak, live, done = max(peak, live + rise), live + net, done | 1 << at
        return peak

    def first(self) -> int:
        """A mask of the items that can run at once."""
        return sum(1 << at for at, needs in enumerate(self.needs) if not needs)

    def next(self, at: int, done: int, ready: int) -> int:
        """A mask of the items that can run after an item, which is in `done` by then."""
        ready &= ~(1 << at)
        for later in self.later[at]:
            if self.needs[later] & ~done == 0:
                ready |= 1 << later
        return ready


def members(mask: int) -> Iterator[int]:
    """The bits of a mask, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def searched(
    items: Items, upper: int, floor: int, *, deadline: float, states: int = 20_000
) -> SearchResult:
    """Look for the order of the items with the lowest peak below `upper`.

    `floor` is a peak that is reached elsewhere, or cannot be avoided: nothing is gained below it.
    """
    everything = (1 << len(items.groups)) - 1
    # From the floor on: below it nothing is gained, so orders that differ only there are equals.
    start = _settled(items, _Node(max(items.live, floor), items.live, 0, items.first(), None, ()))
    heap = [(start.peak, 0, 0, start)]
    seen: dict[int, int] = {}
    # `pushed` settles ties in the heap, so that nodes are never compared.
    count = pushed = 0
    while heap:
        if count >= states or (count % 32 == 0 and time.monotonic() > deadline):
            return SearchResult(None, upper, proven=False)
        peak, _, _, node = heapq.heappop(heap)
        # The first complete order that comes off the heap is the best: all others have a higher
        # peak already, and peaks only grow.
        if node.done == everything:
            return SearchResult(node.path(), peak, proven=True)
        if seen.get(node.done, peak) < peak:
            continue  # the same set was reached with a lower peak since this was pushed
        count += 1
        for at in members(node.ready):
            rise, net = items.cost(at, node.done)
            # No better than what is known, whatever comes behind it.
            if max(peak, node.live + rise) >= upper:
                continue
            done = node.done | 1 << at
            ready = items.next(at, done, node.ready)
            above = max(peak, node.live + rise)
            child = _settled(items, _Node(above, node.live + net, done, ready, node, (at,)))
            if seen.get(child.done, upper) <= child.peak:
                continue
            seen[child.done] = child.peak
            # Of equal peaks the one that is further on: a first complete order comes soon.
            entry = (child.peak, -child.done.bit_count(), pushed, child)
            heapq.heappush(heap, entry)
            pushed += 1
    return SearchResult(None, upper, proven=True)


class _Node:
    """A set of items that have run, those that can run next, and the last ones of a path to it."""

    __slots__ = ("done", "live", "parent", "peak", "ran", "ready")

    def __init__(
        self,
        peak: int,
        live: int,
        done: int,
        ready: int,
        parent: "_Node | None",
        ran: tuple[int, ...],
    ) -> None:
        self.peak, self.live, self.done, self.ready = peak, live, done, ready
        self.parent, self.ran = parent, ran

    def path(self) -> tuple[int, ...]:
        """All items in the order in which they ran."""
        parts: list[tuple[int, ...]] = []
        node: _Node | None = self
        while node is not None:
            parts.append(node.ran)
            node = node.parent
        return tuple(at for part in reversed(parts) for at in part)


def _settled(items: Items, node: _Node) -> _Node:
    """Run, after what has run, all that can without loss."""
    ran = list(node.ran)
    again = True
    while again:
        again = False
        for at in members(node.ready):
            rise, net = items.cost(at, node.done)
            # What it frees can make room for another that did not fit a moment ago.
            if net <= 0 and node.live + rise <= node.peak:
                node.live += net
                node.done |= 1 << at
                node.ready = items.next(at, node.done, node.ready)
                ran.append(at)
                again = True
    node.ran = tuple(ran)
    return node
