"""Simulates the bytes that live at each step of an order: every plan is judged by it.

A storage lives from its maker to the last operation that holds a tensor in it; while an operation
runs, all that it reads, all that it makes and its temporary bytes are there at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vescale_parallel._memory.program import Program


@dataclass(frozen=True)
class Profile:
    """Live bytes along an order.

    Attributes:
        during: while each step runs.
        after: when each step has ended.
    """

    during: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most that lives at once; 0 for an empty program."""
        return max(self.during, default=0)

    @property
    def step(self) -> int:
        """The first step at which so much lives."""
        return self.during.index(self.peak) if self.during else 0


def lifetimes(of: Program, order: Sequence[int]) -> list[tuple[int, int]]:
    """For each storage, the first and the last step at which it lives; kept ones to the last."""
    step = [0] * len(of)
    for at, operation in enumerate(order):
        step[operation] = at
    return [
        (
            step[storage.maker],
            len(of) - 1 if storage.kept else max(step[user] for user in storage.users),
        )
        for storage in of.storages
    ]


def profile(of: Program, order: Sequence[int]) -> Profile:
    """Simulate an order; it has to be valid (`checked_order`)."""
    grows, shrinks = [0] * (len(of) + 1), [0] * (len(of) + 1)
    for storage, (first, last) in zip(of.storages, lifetimes(of, order), strict=True):
        grows[first] += storage.bytes
        if not storage.kept:
            shrinks[last] += storage.bytes
    live, during, after = 0, [], []
    for at, operation in enumerate(order):
        live += grows[at]
        during.append(live + of.operations[operation].temporary)
        live -= shrinks[at]
        after.append(live)
    return Profile(tuple(during), tuple(after))


class PrefixState:
    """A prefix of an order: what has run, what lives, and what each next operation would add."""

    def __init__(self, of: Program) -> None:
        self.of = of
        self.order: list[int] = []
        self.live = 0
        self.peak = 0
        self.left = [len(storage.users) for storage in of.storages]
        self.waits = [len(earlier) for earlier in of.before]
        self.ready = {at for at, count in enumerate(self.waits) if count == 0}
        self._costs: dict[int, tuple[int, int]] = {}

    def cost(self, operation: int) -> tuple[int, int]:
        """Bytes that running it now adds while it runs, and once it has ended."""
        # Kept until a use of one of its storages is taken: planners ask for all that is ready at
        # each step.
        found = self._costs.get(operation)
        if found is None:
            of = self.of
            freed = sum(
                of.storages[at].bytes
                for at in of.touched[operation]
                if self.left[at] == 1 and not of.storages[at].kept
            )
            made = of.made[operation]
            found = self._costs[operation] = (
                made + of.operations[operation].temporary,
                made - freed,
            )
        return found

    def run(self, operation: int) -> None:
        """Run it next; it has to be ready."""
        rise, net = self.cost(operation)
        self.peak = max(self.peak, self.live + rise)
        self.live += net
        self.order.append(operation)
        self.ready.remove(operation)
        # Below 0 it has run: one number for both questions.
        self.waits[operation] = -1
        for at in self.of.touched[operation]:
            self.left[at] -= 1
            if self.left[at] == 1:  # whoever is left frees it now
                for user in self.of.storages[at].users:
                    self._costs.pop(user, None)
        for later in self.of.after[operation]:
            self.waits[later] -= 1
            if self.waits[later] == 0:
                self.ready.add(later)

    def has_run(self, operation: int) -> bool:
        """Whether it is in the prefix."""
        return self.waits[operation] < 0
