"""The order of a plan: the best of program order, of the rules, and of searches around peaks.

1. Candidates: program order, list scheduling, program order with updates pulled forward under
   bounds between the lower bound and its peak, each also with operations run late.
2. Segments between key points hold what can be ordered by itself. Where one is small it is solved.
3. Else rings around the peak: windows of neighbours, and pairs of a piece before and a piece after
   it with all between fixed, as forward and backward pieces around a loss, growing outwards.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vescale_parallel._memory.integer_program import ilp_order
from vescale_parallel._memory.orders import bounded, delayed, list_scheduled, prompt
from vescale_parallel._memory.program import Program, checked_order
from vescale_parallel._memory.reach import Reach, segments
from vescale_parallel._memory.search import Items, SearchResult, searched
from vescale_parallel._memory.simulation import PrefixState, Profile, profile

_BOUNDS: Final = 10  # bounds that are tried between the lower bound and the best peak
_WINDOWS: Final = (12, 24, 48, 96)  # operations of a ring

Solve = Callable[[Items, int, int, float], SearchResult]


@dataclass(frozen=True)
class ChosenOrder:
    """An order and how it was found.

    Attributes:
        order: operations, by index in program order.
        profile: its live bytes.
        lower_bound: bytes below which no order is.
        peaks: the peak of each way that was tried, by its name.
        complete: whether it is proven best, or no search was cut short by time.
    """

    order: tuple[int, ...]
    profile: Profile
    lower_bound: int
    peaks: Mapping[str, int]
    complete: bool


def by_search(items: Items, upper: int, floor: int, deadline: float) -> SearchResult:
    """Order the items by branch and bound."""
    return searched(items, upper, floor, deadline=deadline)


def choose_order(of: Program, *, deadline: float, solve: Solve | None = by_search) -> ChosenOrder:
    """Find an order whose peak is never above program order's; `solve` None leaves out searches."""
    reach = Reach(of)
    planner = _Planner(of, reach.lower_bound(), deadline)
    planner.rules()
    proven = planner.best.peak <= planner.floor
    if not proven and solve is not None:
        # First what can be proven: segments of a few operations. Rings only improve, and say
        # nothing of what is left.
        proven = planner.segments(reach.key_points(), solve)
        if not proven:
            planner.rings(solve)
    bound = planner.best.peak if proven else planner.floor
    complete = planner.complete or proven
    checked_order(of, planner.order)
    return ChosenOrder(planner.order, planner.best, bound, planner.peaks, complete)


def ordered_by_ilp(of: Program, *, deadline: float) -> ChosenOrder:
    """Find an order by one integer program; program order if that finds no better one in time."""
    reach = Reach(of)
    planner = _Planner(of, reach.lower_bound(), deadline)
    planner.offer("integer program", ilp_order(of, reach, deadline))
    complete = planner.complete and not planner.late
    return ChosenOrder(planner.order, planner.best, planner.floor, planner.peaks, complete)


class _Planner:
    """The best order so far, and who found it."""

    def __init__(self, of: Program, floor: int, deadline: float) -> None:
        self.of, self.floor, self.deadline = of, floor, deadline
        self.order = tuple(range(len(of)))
        self.best = profile(of, self.order)
        self.peaks = {"program order": self.best.peak}
        self.complete = True

    def offer(self, name: str, order: Sequence[int] | None) -> int | None:
        """Take an order if it is better than the best; returns its peak."""
        if order is None:
            self.complete = False
            return None
        found = profile(self.of, order)
        self.peaks[name] = min(found.peak, self.peaks.get(name, found.peak))
        # Checked only where it is taken: to check takes longer than to simulate.
        if found.peak < self.best.peak:
            self.order, self.best = checked_order(self.of, order), found
        return found.peak

    @property
    def late(self) -> bool:
        """Whether time is over."""
        return time.monotonic() > self.deadline

    def rules(self) -> None:
        """Orders that need no search."""
        of, start = self.of, self.order
        self.offer("run late", delayed(of, start))
        self.offer("list scheduling", list_scheduled(of, self.deadline))
        for base, name in ((start, "pulled forward"), (delayed(of, start), "late and pulled")):
            low, high = self.floor, self.best.peak
            for _ in range(_BOUNDS):
                if low > high or self.late or self.best.peak <= self.floor:
                    break
                # Bisected, though peaks need not follow bounds: each try is judged by itself, and
                # none is lost.
                bound = (low + high) // 2
                order = bounded(of, base, bound, self.deadline)
                peak = self.offer(name, order)
                if peak is None:
                    break
                low, high = (low, peak - 1) if peak <= bound else (bound + 1, high)
        self.offer("run late", delayed(of, self.order))

    def segments(self, key_points: Sequence[int], solve: Solve) -> bool:
        """Solve what lies between key points, above the lower bound; whether all is proven."""
        # What makes nothing runs at once, so that what has run at a key point is always the same.
        self.order = prompt(self.of, self.order)
        self.best = profile(self.of, self.order)
        proven = True
        for first, end in segments(self.of, self.order, key_points):
            if max(self.best.during[first:end]) > self.floor:
                items = [(at,) for at in self.order[first:end]]
                proven &= self._solved(first, items, solve, "segments")
        return proven

    def rings(self, solve: Solve) -> None:
        """Improve the surroundings of the peak for as long as it helps."""
        improved = True
        while improved and not self.late and self.best.peak > self.floor:
            before, asked = self.best.peak, self.best.step
            for first, groups in self._around(asked):
                self._solved(first, groups, solve, "rings")
                # From a new order on: groups that were made of the old one would not fit into it.
                if self.best.during[asked] < before or self.best.peak < before or self.late:
                    break
            improved = self.best.during[asked] < before or self.best.peak < before

    def _around(self, peak: int) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
        """Items around a step: neighbours, and pairs of pieces with all between as one item."""
        for width in _WINDOWS:
            first, end = max(0, peak - width // 2), min(len(self.of), peak + width // 2)
            yield first, [(at,) for at in self.order[first:end]]
        # Only the small ones, as there are as many pairs as places around the peak.
        for width in _WINDOWS[:2]:
            for inner in range(width // 2, len(self.of) // 2, width):
                left, right = max(0, peak - inner), min(len(self.of), peak + inner)
                first, end = max(0, left - width // 2), min(len(self.of), right + width // 2)
                groups: list[tuple[int, ...]] = [(at,) for at in self.order[first:left]]
                groups += [self.order[left:right], *((at,) for at in self.order[right:end])]
                yield first, groups

    def _solved(self, first: int, groups: Sequence[Sequence[int]], solve: Solve, name: str) -> bool:
        """Order some items in their place; whether no better order of them is left."""
        running = PrefixState(self.of)
        # What lives where the items begin, and how often each storage is still to be used.
        for at in self.order[:first]:
            running.run(at)
        end = first + sum(len(group) for group in groups)
        # To be beaten in this place. Where the peak is elsewhere, it stays what it is.
        here = max(self.best.during[first:end], default=0)
        found = solve(Items(running, groups), here, self.floor, self.deadline)
        self.complete &= not self.late
        if found.items is not None:
            middle = [at for item in found.items for at in groups[item]]
            order = [*self.order[:first], *middle, *self.order[end:]]
            # Better in its place, if not in all: where two pieces share a peak, both have to be.
            self.order, self.best = checked_order(self.of, order), profile(self.of, order)
            self.peaks[name] = self.best.peak
        return found.proven
