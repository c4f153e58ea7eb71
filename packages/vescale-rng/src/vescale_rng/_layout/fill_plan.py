"""Plans a fill from a layout and a local tensor's geometry: checked once, then cached."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from vescale_rng._layout.layout import Box, Ints, ShardLayout, dense_strides, is_row_major
from vescale_rng._layout.layout_check import check_global, check_local
from vescale_rng._layout.window_plan import Window, WindowPlan, window_plan_of

# A window plan of so few parts is kept with its plan; longer ones are made anew, window by window.
_FEW = 512


@dataclass(frozen=True, eq=False)
class FillPlan:
    """What a fill does for one layout on local tensors of one shape and strides.

    Attributes:
        layout: the layout, checked.
        numel: elements of the global tensor.
        contiguous: whether the global tensor is row-major, as torch sees it.
        whole: whether the local tensor is the global one, element for element in memory: torch
            then fills it as one device does.
        span: the range of global memory that the local tensor is, without gaps and in order:
            torch then draws in place. (0, 0) where it holds nothing.
        window_plan: the windows, otherwise.
        kept: the windows of the window_plan, where they are few.
        longest: elements of the longest window.
    """

    layout: ShardLayout
    numel: int
    contiguous: bool
    whole: bool
    span: tuple[int, int] | None
    window_plan: WindowPlan
    kept: tuple[Window, ...] | None
    longest: int

    def windows(self) -> Iterator[Window]:
        """Yield the windows that hold local elements, in memory order."""
        return iter(self.kept) if self.kept is not None else self.window_plan.windows()


def plan_for(layout: ShardLayout, local: torch.Tensor) -> FillPlan:
    """Return the plan of fills of `local`; see `fill_plan_of`."""
    # First by this object's own cache: to find an equal layout in the other one, all of its boxes
    # are hashed.
    shape, strides = local.shape, local.stride()
    return layout.remembered((shape, strides), lambda: fill_plan_of(layout, tuple(shape), strides))


@lru_cache(maxsize=512)
def fill_plan_of(layout: ShardLayout, shape: Ints, strides: Ints) -> FillPlan:
    """Check a layout against a local tensor's shape and strides, and plan its fills.

    Raises:
        LayoutError: the layout contradicts itself or does not cover the local tensor.
    """
    # The global checks first: every rank has the same shape to refuse, and refuses it alike.
    check_global(layout)
    check_local(layout, shape, strides)
    window_plan = window_plan_of(layout)
    kept = _kept(window_plan)
    # An upper bound; where the windows are known, the scratch can be as small as the longest.
    longest = window_plan.longest
    if kept is not None:
        longest = max((window.stop - window.start for window in kept), default=0)
    return FillPlan(
        layout=layout,
        numel=prod(layout.global_shape),
        contiguous=is_row_major(layout.global_shape, layout.memory_order),
        whole=_is_whole(layout),
        span=_span(window_plan),
        window_plan=window_plan,
        kept=kept,
        longest=longest,
    )


def _kept(window_plan: WindowPlan) -> tuple[Window, ...] | None:
    windows, pieces = [], 0
    for window in window_plan.windows():
        windows.append(window)
        pieces += len(window.pieces)
        if pieces > _FEW:
            return None
    return tuple(windows)


def _is_whole(layout: ShardLayout) -> bool:
    """Tell whether one box holds everything, with the strides of the tensor on one device."""
    # Several boxes that cover everything may be in another order: they are copied like parts.
    if len(layout.boxes) != 1 or layout.boxes[0].shape != layout.global_shape:
        return False
    dense = dense_strides(layout.global_shape, layout.memory_order)
    return layout.boxes[0].local_offset == 0 and _same(
        layout.global_shape, layout.boxes[0].local_strides, dense
    )


def _span(window_plan: WindowPlan) -> tuple[int, int] | None:
    """Return the range of global memory that the boxes are one after another, here as there."""
    strides = dense_strides(window_plan.shape)
    ranges = []
    for box in window_plan.boxes:
        if not _is_range(box, window_plan.shape):
            return None
        start = sum(i * stride for i, stride in zip(box.global_offset, strides, strict=True))
        ranges.append((start, start + prod(box.shape), box.local_offset))
    # Boxes come in any order; one after another in global memory, they must be so locally too.
    ranges.sort()
    first = ranges[0][0] if ranges else 0
    here = first
    for start, stop, offset in ranges:
        if start != here or offset != start - first:
            return None
        here = stop
    return first, here


def _is_range(box: Box, shape: Ints) -> bool:
    """Tell whether a box, dims in memory order, is one range of global memory and of local."""
    # Only the slowest dim with more than one index may be sharded: all faster ones must be full,
    # or the box is several ranges.
    outer = next((dim for dim, extent in enumerate(box.shape) if extent > 1), len(shape))
    rest = box.shape[outer + 1 :] == shape[outer + 1 :]
    return rest and _same(box.shape, box.local_strides, dense_strides(box.shape))


def _same(shape: Ints, strides: Ints, others: Ints) -> bool:
    """Tell whether two strides address the same elements: those of a dim of one never matter."""
    return all(a == b for size, a, b in zip(shape, strides, others, strict=True) if size > 1)
