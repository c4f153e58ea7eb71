"""The fewest bytes that any schedule could send for a redistribution, counted element by element.

Seen from one element, ranks hold its value or one term of it, and some ranks want it. Nothing here
looks at a plan; the counting argument is:

- Whoever has all terms together first, call it r, got every term that it lacked by a message of its
  own or merged with others on the way. So at least as many messages as ranks that have to give.
- After that, everybody else who wants the value gets it by one more message at least.

Along an axis where both layouts replicate, every coordinate is taken to help itself: copies could
share the work of a reduction, but then groups would have to wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from vescale_dtensor._layout.mesh import Coordinate, coordinates
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import Partial, Replicate
from vescale_dtensor._layout.shard_geometry import owned, strided_boxes

Placements = tuple[Placement, ...]
Sizes = tuple[int, ...]
Shape = tuple[int, ...]
_LINEAR = {"sum", "avg"}


def fewest_elements(source: Placements, target: Placements, sizes: Sizes, shape: Shape) -> int:
    """Elements that all ranks together have to send, at least, from `source` to `target`."""
    alone = {
        axis
        for axis, (a, b) in enumerate(zip(source, target, strict=True))
        if isinstance(a, Replicate) and isinstance(b, Replicate)
    }
    one = [c for c in coordinates(sizes) if all(c[axis] == 0 for axis in alone)]
    have = {c: elements(source, sizes, shape, c) for c in one}
    want = {c: elements(target, sizes, shape, c) for c in one}
    counted = _Count(source, target)
    total = sum(
        counted.messages([c for c in one if e in have[c]], [c for c in one if e in want[c]])
        for e in range(prod(shape))
    )
    return total * prod(sizes[axis] for axis in alone)


def elements(placements: Placements, sizes: Sizes, shape: Shape, at: Coordinate) -> frozenset[int]:
    """The elements at a coordinate, by their index in the flattened tensor."""
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    along = [
        [
            i
            for cell in strided_boxes(group)
            for i in _indices(cell.box, [steps[d] for d in group.dims])
        ]
        for group in owned(placements, sizes, shape, at)
    ]
    return frozenset(map(sum, product(*along)))


def _indices(box: Iterable[tuple[int, int]], steps: list[int]) -> Iterator[int]:
    ranges = [[i * n for i in range(*ends)] for ends, n in zip(box, steps, strict=True)]
    return map(sum, product(*ranges))


class _Count:
    """Counts messages for one element, given who holds it and who wants it."""

    def __init__(self, source: Placements, target: Placements) -> None:
        self.partial = [axis for axis, p in enumerate(source) if isinstance(p, Partial)]
        self.summed = [axis for axis, p in enumerate(target) if isinstance(p, Partial)]
        # What ranks hold over which the target reduces is already put together there, unless
        # they hold terms of another reduction.
        self.joined = [
            a
            for a in self.summed
            if not isinstance(source[a], Partial) or _alike(source[a], target[a])
        ]

    def messages(self, holding: list[Coordinate], wanting: list[Coordinate]) -> int:
        """The fewest messages that bring the element from those who hold it to those who want."""
        known: dict[Coordinate, set[Coordinate]] = {}
        for rank in holding:
            term = tuple(rank[axis] for axis in self.partial)
            known.setdefault(_without(rank, self.joined), set()).add(term)
        everything = set().union(*known.values())
        wants = {_without(rank, self.summed) for rank in wanting}
        ready = {_without(n, self.summed) for n, has in known.items() if has == everything}
        # A term that is missing anywhere leaves a rank that holds it, and a rank holds one term.
        lacked = {_without(rank, self.joined) for rank in wanting}
        leaving = set().union(*(everything - known.get(node, set()) for node in lacked))
        if self.joined != self.summed:
            leaving = set()
        if ready:
            return max(len(wants - ready), len(leaving))
        first = min(
            len(everything - known.get(node, set())) + len(wants - {_without(node, self.summed)})
            for node in {_without(rank, self.joined) for rank in (*holding, *wanting)}
        )
        return max(first, len(leaving))


def _alike(a: Placement, b: Placement) -> bool:
    ops = {p.reduce_op for p in (a, b) if isinstance(p, Partial)}
    return len(ops) == 1 or ops <= {"sum", "avg"}


def _without(rank: Coordinate, axes: list[int]) -> Coordinate:
    return tuple(-1 if axis in axes else c for axis, c in enumerate(rank))
