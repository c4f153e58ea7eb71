"""Finds runs of things that are at equal distances in two memories."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, TypeVar

T = TypeVar("T")


def strided_runs(
    things: Sequence[T],
    alike: Callable[[T], Any],
    place: Callable[[T], int],
    local_place: Callable[[T], int],
) -> Iterator[tuple[T, int, int, int]]:
    """Yield each arithmetic progression as (first thing, how many, step, local step).

    Args:
        things: in any order; no two of them at the same place.
        alike: sortable; only things of which it is equal are joined.
        place: where one is in one memory.
        local_place: where it is in the other.
    """
    ordered = sorted(things, key=lambda thing: (alike(thing), place(thing)))
    for _, group in groupby(ordered, key=alike):
        members = list(group)
        places = [(place(member), local_place(member)) for member in members]
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(places)]
        # Greedy: a run continues as long as both steps stay what they were.
        at = 0
        while at < len(members):
            step = steps[at] if at < len(steps) else (0, 0)
            count = 1
            # A strided view cannot go backwards: steps have to be positive in both.
            while at + count <= len(steps) and steps[at + count - 1] == step and min(step) > 0:
                count += 1
            yield members[at], count, *(step if count > 1 else (0, 0))
            at += count
