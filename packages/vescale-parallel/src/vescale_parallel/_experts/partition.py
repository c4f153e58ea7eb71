"""Assigns consecutive experts to ranks by their load."""

from __future__ import annotations

from collections.abc import Sequence


def partition(loads: Sequence[int], ranks: int, most: int) -> tuple[int, ...]:
    """Return how many consecutive experts each rank holds, so that the busiest has least to do.

    Args:
        loads: what each expert has to do.
        ranks: how many there are.
        most: experts that a rank may hold; with all ranks at least as many as there are.
    """
    low, high = max(loads, default=0), sum(loads)
    while low < high:
        middle = (low + high) // 2
        if _filled(loads, ranks, most, middle) is None:
            low = middle + 1
        else:
            high = middle
    found = _filled(loads, ranks, most, low)
    assert found is not None, "all of it fits where nothing but their number bounds experts"
    return found


def _filled(loads: Sequence[int], ranks: int, most: int, bound: int) -> tuple[int, ...] | None:
    """Fill one rank after another up to the bounds; None where experts are left over."""
    counts, at = [], 0
    for _ in range(ranks):
        start, own = at, 0
        while at < len(loads) and at - start < most and own + loads[at] <= bound:
            own += loads[at]
            at += 1
        counts.append(at - start)
    return tuple(counts) if at == len(loads) else None
