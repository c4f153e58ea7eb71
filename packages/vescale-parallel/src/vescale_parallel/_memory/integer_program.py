"""The order of all operations as one integer program, without key points, rings or rules.

This is how MODeL (OLLA, Steiner et al., ICML 2023) orders a graph: binaries for every operation and
every step at which it may run. It finds a best order if it ends, and on whole training steps it
hardly ever does: it is here to be compared with. Where MODeL has one binary for a tensor that is
made at a step and one for a tensor that is kept, an operation here has one for having run by a
step, and tensors, which follow from those, have fractions: the same orders and peaks, fewer
variables.
"""

import time
from collections.abc import Sequence
from typing import Final

from vescale_parallel._memory.highs import Model
from vescale_parallel._memory.program import Program
from vescale_parallel._memory.reach import Reach

_VARIABLES: Final = 400_000
"""Above these HiGHS runs out of memory before it has begun."""

# In the place of variables: what has not run by a step in any order, and what has in all.
_NEVER: Final = -2
_ALWAYS: Final = -1
_NUMBERS: Final = {_NEVER: 0.0, _ALWAYS: 1.0}


def ilp_order(of: Program, reach: Reach, deadline: float) -> tuple[int, ...] | None:
    """The best order that HiGHS finds in time; None if it finds none, or does not begin."""
    if not len(of):
        return ()
    written = _OrderProgram(of, reach, deadline)
    found = written.model.solved(deadline) if written.complete else None
    if found is None:
        return None
    steps = [sum(found[one] for one in each.values()) for each in written.ran]
    # Whoever has run for longer ran earlier; equal sums differ by rounding only.
    latest = [written.last[at] - steps[at] for at in range(len(of))]
    return _valid(of, sorted(range(len(of)), key=lambda at: latest[at]))


def _valid(of: Program, wanted: Sequence[int]) -> tuple[int, ...]:
    """The order that is closest to a wished one and in which nobody runs before what it needs."""
    rank = {at: place for place, at in enumerate(wanted)}
    order: list[int] = []
    done: set[int] = set()
    for at in wanted:
        waiting = [at]
        while waiting:
            one = waiting[-1]
            missing = of.before[one] - done
            if missing:
                waiting.append(min(missing, key=rank.__getitem__))
                continue
            waiting.pop()
            if one not in done:
                done.add(one)
                order.append(one)
    return tuple(order)


class _OrderProgram:
    """The program: who has run by which step, what lives at it, and the peak.

    Attributes:
        model: variables and rows.
        ran: for each operation, its binaries by step; before its first it has not run.
        last: for each operation, the step at which it has run in every order.
        complete: whether all was written, in time and within bounds.
    """

    def __init__(self, of: Program, reach: Reach, deadline: float) -> None:
        self.of, self.model = of, Model()
        count = len(of)
        # An operation runs no sooner than all that come before it in every order, and no later
        # than what leaves room for those behind it: only these steps need a binary.
        first = [one.bit_count() for one in reach.earlier]
        self.last = [count - 1 - one.bit_count() for one in reach.later]
        temporary = max(one.temporary for one in of.operations)
        # Bytes as parts of one: the solver's tolerances are absolute.
        self.unit = max(1, sum(one.bytes for one in of.storages) + temporary)
        self.peak = self.model.variable(0, 1, cost=1)
        windows = sum(last - low for low, last in zip(first, self.last, strict=True))
        self.complete = windows <= _VARIABLES
        self.ran: list[dict[int, int]] = []
        if not self.complete:
            return
        for low, last in zip(first, self.last, strict=True):
            made = {step: self.model.variable(0, 1, whole=True) for step in range(low, last)}
            self.ran.append(made)
        for at in range(count):
            self._order(at)
        for step in range(count):
            self._one_a_step(step)
            self._level(step)
            if len(self.model.cost) > 2 * _VARIABLES or time.monotonic() > deadline:
                self.complete = False
                return

    def _has_run(self, at: int, step: int) -> int:
        """Whether an operation has run by a step: a variable, `_NEVER` or `_ALWAYS`."""
        return _ALWAYS if step >= self.last[at] else self.ran[at].get(step, _NEVER)

    def _row(self, terms: Sequence[tuple[float, int]], at_most: float) -> None:
        """A row of the program, in which what is no variable moves to the right."""
        left: dict[int, float] = {}
        for factor, one in terms:
            if one in _NUMBERS:
                at_most -= factor * _NUMBERS[one]
            else:
                left[one] = left.get(one, 0.0) + factor
        if left:
            self.model.row(left, at_most)

    def _order(self, at: int) -> None:
        """Who has run has run, and what it waits for ran a step earlier at the latest."""
        for step in self.ran[at]:
            now = self._has_run(at, step)
            self._row([(1, now), (-1, self._has_run(at, step + 1))], 0)
            for one in self.of.before[at]:
                self._row([(1, now), (-1, self._has_run(one, step - 1))], 0)

    def _one_a_step(self, step: int) -> None:
        every = [self._has_run(at, step) for at in range(len(self.of))]
        # Rows have upper bounds only: an equation is two of them.
        self._row([(1, one) for one in every], step + 1)
        self._row([(-1, one) for one in every], -step - 1)

    def _level(self, step: int) -> None:
        """Hold the peak above what lives while the operation of a step runs."""
        terms: list[tuple[float, int]] = [(-1, self.peak)]
        for storage in self.of.storages:
            if not storage.bytes:
                continue
            size, made = storage.bytes / self.unit, self._has_run(storage.maker, step)
            if made == _NEVER:
                continue
            if storage.kept:
                terms.append((size, made))
                continue
            # It lives while one of its users has not run at the step before.
            waiting = {self._has_run(one, step - 1) for one in storage.users} - {_ALWAYS}
            # In every order all of its users have run by then: it is gone.
            if not waiting:
                continue
            # In every order one of its users is still to come: it lives as soon as it is made.
            if _NEVER in waiting:
                terms.append((size, made))
                continue
            # No binary: the rows lift it to 1 where it is made and somebody waits, and the peak,
            # which is to be small, holds it down elsewhere.
            lives = self.model.variable(0, 1)
            for one in waiting:
                self._row([(1, made), (-1, one), (-1, lives)], 0)
            terms.append((size, lives))
        for at, operation in enumerate(self.of.operations):
            if operation.temporary:
                size = operation.temporary / self.unit
                # Who has run by this step and not by the one before is running.
                terms += [(size, self._has_run(at, step)), (-size, self._has_run(at, step - 1))]
        self._row(terms, 0)
