"""From a layout and a local tensor's geometry to what a fill does: checked once, then kept."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from vescale_rng._layout.layout import Box, Ints, Layout, dense_strides, is_row_major
from vescale_rng._layout.layout_check import check_global, check_local
from vescale_rng._layout.window_plan import Sweep, Window, sweep_of

# A sweep of so few pieces is kept with its plan; longer ones are made anew, window by window.
_FEW = 512


@dataclass(frozen=True, eq=False)
class Plan:
    """What a fill does for one layout on local tensors of one shape and strides.

    Attributes:
        layout: the layout, checked.
        numel: elements of the global tensor.
        contiguous: whether the global tensor is row-major, as torch sees it.
        whole: whether the local tensor is the global one, element for element in memory: torch
            then fills it as one device does.
        span: the range of global memory that the local tensor is, without gaps and in order:
            torch then draws in place. (0, 0) where it holds nothing.
        sweep: the windows, otherwise.
        kept: the windows of the sweep, where they are few.
        longest: elements of the longest window.
    """

    layout: Layout
    numel: int
    contiguous: bool
    whole: bool
    span: tuple[int, int] | None
    sweep: Sweep
    kept: tuple[Window, ...] | None
    longest: int

    def windows(self) -> Iterator[Window]:
        """The windows that hold local elements, in memory order."""
        return iter(self.kept) if self.kept is not None else self.sweep.windows()


def plan_for(layout: Layout, local: torch.Tensor) -> Plan:
    """The plan of fills of ``local``; see `plan_of`."""
    shape, strides = local.shape, local.stride()
    return layout.remembered((shape, strides), lambda: plan_of(layout, tuple(shape), strides))


@lru_cache(maxsize=512)
def plan_of(layout: Layout, shape: Ints, strides: Ints) -> Plan:
    """Check a layout against a local tensor's shape and strides, and plan its fills.

    Raises:
        LayoutError: the layout contradicts itself or does not cover the local tensor.
    """
    check_global(layout)
    check_local(layout, shape, strides)
    sweep = sweep_of(layout)
    kept = _kept(sweep)
    longest = sweep.longest
    if kept is not None:
        longest = max((window.stop - window.start for window in kept), default=0)
    return Plan(
        layout=layout,
        numel=prod(layout.global_shape),
        contiguous=is_row_major(layout.global_shape, layout.memory_order),
        whole=_is_whole(layout),
        span=_span(sweep),
        sweep=sweep,
        kept=kept,
        longest=longest,
    )


def _kept(sweep: Sweep) -> tuple[Window, ...] | None:
    windows, pieces = [], 0
    for window in sweep.windows():
        windows.append(window)
        pieces += len(window.pieces)
        if pieces > _FEW:
            return None
    return tuple(windows)


def _is_whole(layout: Layout) -> bool:
    """Whether one box holds everything, with the strides of the tensor on one device."""
    if len(layout.boxes) != 1 or layout.boxes[0].shape != layout.global_shape:
        return False
    dense = dense_strides(layout.global_shape, layout.memory_order)
    return layout.boxes[0].local_offset == 0 and _same(
        layout.global_shape, layout.boxes[0].local_strides, dense
    )


def _span(sweep: Sweep) -> tuple[int, int] | None:
    """The range of global memory that the boxes are one after another, here as there."""
    strides = dense_strides(sweep.shape)
    ranges = []
    for box in sweep.boxes:
        if not _is_range(box, sweep.shape):
            return None
        start = sum(i * stride for i, stride in zip(box.global_offset, strides, strict=True))
        ranges.append((start, start + prod(box.shape), box.local_offset))
    ranges.sort()
    first = ranges[0][0] if ranges else 0
    here = first
    for start, stop, offset in ranges:
        if start != here or offset != start - first:
            return None
        here = stop
    return first, here


def _is_range(box: Box, shape: Ints) -> bool:
    """Whether a box, its dims in memory order, is one range of global memory and of the local."""
    outer = next((dim for dim, extent in enumerate(box.shape) if extent > 1), len(shape))
    rest = box.shape[outer + 1 :] == shape[outer + 1 :]
    return rest and _same(box.shape, box.local_strides, dense_strides(box.shape))


def _same(shape: Ints, strides: Ints, others: Ints) -> bool:
    """Whether two strides address the same elements: those of a dim of one never matter."""
    return all(a == b for size, a, b in zip(shape, strides, others, strict=True) if size > 1)
