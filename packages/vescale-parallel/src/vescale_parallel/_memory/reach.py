"""Computes which operations precede which in every order: key points, lower bounds."""

from collections.abc import Sequence
from itertools import pairwise

from vescale_parallel._memory.program import Program


class Reach:
    """The operations that come before and after each one in every order, as bit masks.

    Bit `i` of `earlier[v]` is set where operation `i` has to run before `v`.
    """

    def __init__(self, of: Program) -> None:
        self.of = of
        self.earlier = [0] * len(of)
        self.later = [0] * len(of)
        # Program order is a valid one, so that masks of what comes before are complete when they
        # are asked for.
        for at in range(len(of)):
            for one in of.before[at]:
                # Masks of integers: a set for each of ten thousand operations would take
                # gigabytes.
                self.earlier[at] |= self.earlier[one] | 1 << one
        for at in reversed(range(len(of))):
            for one in of.after[at]:
                self.later[at] |= self.later[one] | 1 << one

    def key_points(self) -> list[int]:
        """Operations that are comparable with every operation that makes bytes.

        Their step is the same in every order but for operations that make nothing. As those lose
        nothing by running as soon as they can, what lies between two key points can be ordered by
        itself (ROAM, arXiv 2310.19295).
        """
        heavy = sum(1 << at for at in range(len(self.of)) if makes(self.of, at))
        return [
            at
            for at in range(len(self.of))
            if heavy >> at & 1 and not heavy & ~(self.earlier[at] | self.later[at] | 1 << at)
        ]

    def lower_bound(self) -> int:
        """Bytes that live at some operation in every order.

        While `v` runs, a storage lives in every order when its maker is `v` or comes before it, and
        it is kept, or some user is `v` or comes after it.
        """
        size = len(self.of)
        forced = [one.temporary for one in self.of.operations]
        for storage in self.of.storages:
            possible = self.later[storage.maker] | 1 << storage.maker
            if not storage.kept:
                until = 0
                for user in storage.users:
                    until |= self.earlier[user] | 1 << user
                possible &= until
            # The bits that are set, found in C: a loop over all of them takes seconds.
            digits = bin(possible)[:1:-1]
            at = digits.find("1")
            while 0 <= at < size:
                forced[at] += storage.bytes
                at = digits.find("1", at + 1)
        return max([*forced, sum(one.bytes for one in self.of.storages if one.kept)])


def makes(of: Program, operation: int) -> bool:
    """Whether an operation makes bytes: a view and a write in place do not."""
    return of.made[operation] > 0 or of.operations[operation].temporary > 0


def segments(of: Program, order: Sequence[int], key_points: Sequence[int]) -> list[tuple[int, int]]:
    """Steps between key points, as (first, behind last).

    A key point ends its segment, together with what makes nothing behind it. The order has to be
    one in which all that makes nothing runs as soon as it can (`prompt`).
    """
    keys, edges, passed = set(key_points), [0], False
    for at, operation in enumerate(order):
        if passed and makes(of, operation):
            edges.append(at)
            passed = False
        # Behind it, and not before: what makes nothing and follows it belongs to its segment.
        passed |= operation in keys
    edges.append(len(order))
    return [(one, other) for one, other in pairwise(edges) if other > one]
