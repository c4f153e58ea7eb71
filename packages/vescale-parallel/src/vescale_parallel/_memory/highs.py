"""HiGHS, by scipy's `milp`: orders of a few operations, and offsets of a few storages.

scipy is optional (`pip install vescale-parallel[memory]`). HiGHS is asked for whole numbers and
answers in floating point: what comes back is rounded, and judged by the simulator or the validator
like any other plan.
"""

import importlib.util
import time
from collections.abc import Sequence
from typing import Final

from vescale_parallel._memory.search import Items, SearchResult

_ITEMS: Final = 32  # steps and items of an order: more take minutes


def has_highs() -> bool:
    """Whether scipy is installed."""
    found = importlib.util.find_spec("scipy") is not None
    # A folder of that name is found as well, with nothing in it.
    return found and importlib.util.find_spec("scipy.optimize") is not None


class Model:
    """Rows and bounds of a mixed integer program, put together one by one."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.whole: list[int] = []
        self.highest: list[float] = []
        self.lowest: list[float] = []
        self.rows: list[dict[int, float]] = []
        self.at_most: list[float] = []

    def variable(self, low: float, high: float, *, cost: float = 0, whole: bool = False) -> int:
        """Add a variable; returns its number."""
        self.cost.append(cost)
        self.whole.append(int(whole))
        self.lowest.append(low)
        self.highest.append(high)
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], at_most: float) -> None:
        """Demand that a weighted sum of variables is no more than a number."""
        self.rows.append(terms)
        self.at_most.append(at_most)

    def solved(self, deadline: float) -> list[float] | None:
        """Values of the variables, the best so far; None if time was too short."""
        from scipy import optimize, sparse

        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return None
        at = [row for row, terms in enumerate(self.rows) for _ in terms]
        columns = [column for terms in self.rows for column in terms]
        values = [value for terms in self.rows for value in terms.values()]
        shape = len(self.rows), len(self.cost)
        matrix = sparse.csr_array((values, (at, columns)), shape=shape)
        answer = optimize.milp(
            self.cost,
            integrality=self.whole,
            bounds=optimize.Bounds(self.lowest, self.highest),
            constraints=optimize.LinearConstraint(matrix, ub=self.at_most),
            options={"time_limit": seconds, "mip_rel_gap": 1e-9},
        )
        return None if answer.x is None else [float(one) for one in answer.x]


def highs_layout(
    sizes: Sequence[int], pairs: Sequence[tuple[int, int]], upper: int, deadline: float
) -> tuple[int, ...] | None:
    """Offsets of blocks of which some may not overlap, within `upper` bytes; None if none is found.

    Each such pair has a binary: which of the two lies below.
    """
    # The smallest block is one: below the solver's tolerance it would be as good as nothing.
    unit = min((one for one in sizes if one), default=1)
    model = Model()
    top = model.variable(0, upper / unit, cost=1)
    places = [model.variable(0, (upper - one) / unit) for one in sizes]
    for place, size in zip(places, sizes, strict=True):
        model.row({place: 1, top: -1}, -size / unit)
    # Switches a row off: no offset is larger. Larger than needed would be less exact.
    big = upper / unit
    for one, other in pairs:
        # 1: `one` lies above `other`. Each value switches one of the two rows off.
        above = model.variable(0, 1, whole=True)
        model.row({places[one]: 1, places[other]: -1, above: -big}, -sizes[one] / unit)
        model.row({places[other]: 1, places[one]: -1, above: big}, big - sizes[other] / unit)
    found = model.solved(deadline)
    if found is None:
        return None
    return _settled(sizes, pairs, [found[place] for place in places])


def _settled(
    sizes: Sequence[int], pairs: Sequence[tuple[int, int]], places: Sequence[float]
) -> tuple[int, ...]:
    """Whole offsets from inexact ones: each block on top of those below it."""
    below: list[list[int]] = [[] for _ in sizes]
    for one, other in pairs:
        low, high = (one, other) if places[one] <= places[other] else (other, one)
        below[high].append(low)
    offsets = [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda one: places[one]):
        offsets[at] = max((offsets[one] + sizes[one] for one in below[at]), default=0)
    return tuple(offsets)


def by_highs(items: Items, upper: int, floor: int, deadline: float) -> SearchResult:
    """Order a few items; those of more than one operation, and too many, are left as they are.

    A binary for each item and step says whether it has run by then; one for each storage that the
    items free says whether it lives. The peak over all steps is minimised. Nothing counts as
    proven, as HiGHS is right up to a tolerance only.
    """
    count = len(items.groups)
    if count > _ITEMS or any(len(group) > 1 for group in items.groups):
        return SearchResult(None, upper, proven=False)
    model = Model()
    # Bytes as parts of the upper bound: tolerances of the solver are absolute, and bytes are
    # millions.
    unit = max(1, upper)
    peak = model.variable(max(floor, items.live) / unit, 1, cost=1)
    ran = [[model.variable(0, 1, whole=True) for _ in range(count)] for _ in range(count)]
    for at, steps in enumerate(ran):
        for step in range(count):
            if step:
                # Who has run stays so.
                model.row({steps[step - 1]: 1, steps[step]: -1}, 0)
            for one in range(count):
                if items.needs[at] >> one & 1:
                    before = {ran[one][step - 1]: -1.0} if step else {}
                    model.row({steps[step]: 1, **before}, 0)
    for step in range(count):  # exactly one item a step
        every = [steps[step] for steps in ran]
        model.row(dict.fromkeys(every, 1), step + 1)
        model.row(dict.fromkeys(every, -1), -step - 1)
    _levels(model, items, ran, peak, unit)
    found = model.solved(deadline)
    if found is None:
        return SearchResult(None, upper, proven=False)
    # Whoever has run for the most steps ran first.
    order = sorted(range(count), key=lambda at: -sum(found[one] for one in ran[at]))
    reached = items.peak(order)
    if reached is None or reached >= upper:
        return SearchResult(None, upper, proven=False)
    return SearchResult(tuple(order), reached, proven=False)


def _levels(model: Model, items: Items, ran: Sequence[Sequence[int]], peak: int, unit: int) -> None:
    """Rows that hold the peak above what lives at each step."""
    count = len(ran)
    for step in range(count):
        level: dict[int, float] = {peak: -1}
        for at in range(count):
            made, temporary = items.grows(at)
            level[ran[at][step]] = level.get(ran[at][step], 0) + (made + temporary) / unit
            if step:  # its temporary bytes are gone
                before = ran[at][step - 1]
                level[before] = level.get(before, 0) - temporary / unit
        if step:
            for users, freed in items.freed():
                gone = model.variable(0, 1)
                for user in users:
                    model.row({gone: 1, ran[user][step - 1]: -1}, 0)
                level[gone] = level.get(gone, 0) - freed / unit
        model.row(level, -items.live / unit)
