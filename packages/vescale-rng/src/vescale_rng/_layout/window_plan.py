"""The plan of a fill: what to draw of the global tensor, and what to copy out of it.

The global tensor is split, in memory order, into windows of bounded size, such that what a box has
in common with a window is a box again: one strided copy, however many rows it has.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod
from operator import attrgetter

from vescale_rng._layout.layout import Box, Ints, ShardLayout, dense_strides
from vescale_rng._layout.strided_runs import strided_runs

# Elements: half a megabyte of fp32 stays in the cache, and Python's share of the time is 3 %. To
# split finer, so that gaps inside a window are skipped, gains less than it costs: a word
# that is dropped takes 2 ns, an element that is drawn takes 3 to 6.
_WINDOW = 1 << 17


@dataclass(frozen=True)
class BoxRun:
    """Boxes at equal distances, here as there: copied like one box of one more dim.

    Attributes:
        box: the first of them.
        count: how many.
        step: elements of global memory from one to the next.
        local_step: elements of the local tensor from one to the next.
    """

    box: Box
    count: int
    step: int
    local_step: int


@dataclass(frozen=True)
class WindowCopy:
    """What one run of boxes has in common with one window.

    Attributes:
        cell: the window, by its indices; sorts in memory order.
        start: its first element, by place in global memory.
        stop: one past its last element.
        shape: its extents: the boxes of the run, then the dims in memory order.
        strides: its strides in global memory, and so in what is drawn.
        local_offset: where its first element is in the local tensor.
        local_strides: its strides in the local tensor.
    """

    cell: Ints
    start: int
    stop: int
    shape: Ints
    strides: Ints
    local_offset: int
    local_strides: Ints


@dataclass(frozen=True)
class Window:
    """A range of global memory to draw at once, and what to copy out of it."""

    start: int
    stop: int
    pieces: tuple[WindowCopy, ...]


@dataclass(frozen=True)
class WindowPlan:
    """All windows of a layout, in memory order, made one by one.

    Attributes:
        shape: global shape, dims in memory order.
        boxes: the local boxes with elements, dims in memory order.
        runs: the same boxes, with those at equal distances as one.
        axis: the dim that windows split.
        step: the indices of that dim in one window.
    """

    shape: Ints
    boxes: tuple[Box, ...]
    runs: tuple[BoxRun, ...]
    axis: int
    step: int

    @property
    def longest(self) -> int:
        """Elements of the longest window."""
        return min(prod(self.shape), self.step * prod(self.shape[self.axis + 1 :]))

    def windows(self) -> Iterator[Window]:
        """Yield the windows that hold local elements, in memory order."""
        # Each run's boxes come in memory order, so a merge needs one of each run at a time.
        pieces = heapq.merge(*(self._pieces(run) for run in self.runs), key=attrgetter("cell"))
        for _, group in groupby(pieces, key=attrgetter("cell")):
            members = _joined(list(group))
            start = min(piece.start for piece in members)
            yield Window(start, max(piece.stop for piece in members), members)

    def _pieces(self, run: BoxRun) -> Iterator[WindowCopy]:
        """Yield what `run` has in common with each window, in memory order."""
        axis, step, box = self.axis, self.step, run.box
        # Which windows the box reaches: all of an index of the axis is in one window.
        low, high = box.global_offset[axis], box.global_offset[axis] + box.shape[axis]
        ranges = [range(o, o + n) for o, n in zip(box.global_offset, box.shape, strict=True)]
        # Before the axis one index each, at the axis a stretch, after it all that the box has:
        # a window is never split inside a faster dim, so the stretch stays a box.
        for *outer, cut in product(*ranges[:axis], range(low // step, (high - 1) // step + 1)):
            begin, end = max(low, cut * step), min(high, (cut + 1) * step)
            first = (*outer, begin, *box.global_offset[axis + 1 :])
            yield self._piece(run, (*outer, cut), first, end - begin)

    def _piece(self, run: BoxRun, cell: Ints, first: Ints, extent: int) -> WindowCopy:
        box = run.box
        # The first dim of a copy counts the boxes of its run.
        strides = (run.step, *dense_strides(self.shape)[self.axis :])
        shape = (run.count, extent, *box.shape[self.axis + 1 :])
        start = _dot(first, dense_strides(self.shape))
        # Local strides belong to the box: distances count from its first element.
        inside = tuple(i - o for i, o in zip(first, box.global_offset, strict=True))
        return WindowCopy(
            cell=cell,
            start=start,
            stop=start + 1 + _dot([n - 1 for n in shape], strides),
            shape=shape,
            strides=strides,
            local_offset=box.local_offset + _dot(inside, box.local_strides),
            local_strides=(run.local_step, *box.local_strides[self.axis :]),
        )


def window_plan_of(layout: ShardLayout, window: int | None = None) -> WindowPlan:
    """Plan the windows of `layout`, of at most `window` elements each (None: cache-sized)."""
    window = _WINDOW if window is None else window
    order = layout.memory_order or tuple(range(len(layout.global_shape)))
    # A tensor without dims is swept as one of one dim.
    pad = (1,) if not order else ()
    shape = pad + _permuted(layout.global_shape, order)
    boxes = tuple(
        Box(
            (0,) * len(pad) + _permuted(box.global_offset, order),
            pad + _permuted(box.shape, order),
            box.local_offset,
            pad + _permuted(box.local_strides, order),
        )
        for box in layout.boxes
        if 0 not in box.shape
    )
    strides = dense_strides(shape)
    # The slowest dim of which one index fits in a window.
    axis = next(dim for dim, stride in enumerate(strides) if stride <= window)
    return WindowPlan(shape, boxes, _runs(boxes, strides, axis), axis, window // strides[axis])


def _runs(boxes: Sequence[Box], strides: Ints, axis: int) -> tuple[BoxRun, ...]:
    """Join the boxes that differ only in dims inside of every window."""
    inner = axis + 1

    # Joined boxes differ in dims faster than the axis only, so one window holds all of them.
    def alike(box: Box) -> tuple[Ints, ...]:
        return (box.global_offset[:inner], box.shape, box.local_strides)

    def place(box: Box) -> int:
        return _dot(box.global_offset, strides)

    found = strided_runs(boxes, alike, place, attrgetter("local_offset"))
    return tuple(BoxRun(box, count, step, local) for box, count, step, local in found)


def _joined(pieces: list[WindowCopy]) -> tuple[WindowCopy, ...]:
    """Join the copies of one window that are at equal distances."""
    if len(pieces) == 1:
        return tuple(pieces)
    found = strided_runs(
        pieces,
        attrgetter("shape", "strides", "local_strides"),
        attrgetter("start"),
        attrgetter("local_offset"),
    )
    return tuple(
        piece
        if count == 1
        else replace(
            piece,
            stop=piece.stop + (count - 1) * step,
            shape=(count, *piece.shape),
            strides=(step, *piece.strides),
            local_strides=(local, *piece.local_strides),
        )
        for piece, count, step, local in found
    )


def _permuted(values: Sequence[int], order: Sequence[int]) -> Ints:
    return tuple(values[dim] for dim in order)


def _dot(indices: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * stride for i, stride in zip(indices, strides, strict=True))
