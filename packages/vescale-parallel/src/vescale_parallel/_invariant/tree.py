"""The fixed binary tree over logical shards, whose order every sum over the batch follows.

A node is the span (low, high) of the shards below it. Which nodes a rank can finish alone follows
from its shards; the tree itself knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

Span = tuple[int, int]

T = TypeVar("T")


def middle(span: Span) -> int:
    """Return where a node of two shards or more is split: the left side is a power of two."""
    low, high = span
    # Not the half: so the left side is full, and appending shards changes no node that was there.
    size = 1
    while 2 * size < high - low:
        size *= 2
    return low + size


def nodes_within(span: Span, own: Span) -> list[Span]:
    """Return the largest nodes below `span` that lie in `own`; at most two for each level."""
    low, high = span
    if low >= own[1] or high <= own[0]:
        return []
    if own[0] <= low and high <= own[1]:
        return [span]
    at = middle(span)
    return nodes_within((low, at), own) + nodes_within((at, high), own)


def shares(shards: int, ranks: int) -> list[Span]:
    """Return the shards of each rank: in a row, as many for each as can be."""
    # Integers: rounding of floats would differ for some numbers of ranks.
    ends = [shards * rank // ranks for rank in range(ranks + 1)]
    return list(pairwise(ends))


def rows_of(rows: int, shards: int) -> list[int]:
    """Return the rows of each shard; sizes differ by one at most, and may be zero."""
    return [rows // shards + (shard < rows % shards) for shard in range(shards)]


def present(spans: Sequence[Span], rows: Sequence[int]) -> list[Span]:
    """Return the nodes below which there are rows at all."""
    return [(low, high) for low, high in spans if any(rows[low:high])]


class TreeSum(Generic[T]):
    """Adds leaves in the order of the tree, and keeps as few sums as that order allows.

    Args:
        shards: leaves of the tree.
        add: returns the sum of a left and a right one; may write into the left.
    """

    def __init__(self, shards: int, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._parents = _parents((0, shards))
        self._found: dict[Span, T | None] = {}

    def put(self, shard: int, value: T | None) -> None:
        """Add the sum of one shard; None where it has no rows, which counts as nothing."""
        span: Span = (shard, shard + 1)
        while True:
            self._found[span] = value
            parent = self._parents.get(span)
            if parent is None:
                return
            left, right = (parent[0], middle(parent)), (middle(parent), parent[1])
            if left not in self._found or right not in self._found:
                return
            # The same two operands whoever adds them: sums of floats may not be regrouped.
            value = _added(self._add, self._found.pop(left), self._found.pop(right))
            span = parent

    def take(self) -> dict[Span, T]:
        """Return the sums of the largest nodes that are complete, and forget them."""
        # In the order of spans, by which receivers tell the pieces of a message apart.
        found = {span: one for span, one in sorted(self._found.items()) if one is not None}
        self._found = {}
        return found


def total(shards: int, sums: Mapping[Span, T], add: Callable[[T, T], T]) -> T | None:
    """Return the sum at the root, from those of nodes that cover all shards with rows."""

    def at(span: Span) -> T | None:
        if span in sums:
            return sums[span]
        if span[1] - span[0] < 2:
            return None
        return _added(add, at((span[0], middle(span))), at((middle(span), span[1])))

    return at((0, shards))


def _added(add: Callable[[T, T], T], left: T | None, right: T | None) -> T | None:
    if left is None or right is None:
        # No zeros are added in place of what is not there: -0.0 + 0.0 is 0.0.
        return right if left is None else left
    return add(left, right)


def _parents(span: Span) -> dict[Span, Span]:
    if span[1] - span[0] < 2:
        return {}
    left, right = (span[0], middle(span)), (middle(span), span[1])
    return {left: span, right: span} | _parents(left) | _parents(right)
