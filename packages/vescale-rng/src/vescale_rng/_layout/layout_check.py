"""Refuse layouts that contradict themselves, the global shape, or the local tensor."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod

import torch

from vescale_rng._errors import LayoutError
from vescale_rng._layout.layout import Box, Ints, ShardLayout, check_order


def check_global(layout: ShardLayout) -> None:
    """Check the boxes against the global shape and against one another.

    Raises:
        LayoutError: an extent is negative, the memory order is no permutation, a box has another
            number of dims, leaves the tensor, or shares elements with another box.
    """
    shape = layout.global_shape
    check_order(shape, layout.memory_order)
    for box in layout.boxes:
        _check_box(box, shape)
    for a, b in _neighbours(layout.boxes):
        if _overlap(a, b):
            raise LayoutError(
                f"two boxes of the tensor of shape {shape} overlap: {_say(a)} and {_say(b)}"
            )


def _neighbours(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Yield the pairs of boxes that can overlap, by the dim that tells most of them apart."""
    if len(boxes) < 2 or not boxes[0].shape:
        yield from combinations(boxes, 2)
        return
    dims = range(len(boxes[0].shape))
    # Sorted along the dim with most distinct offsets, few boxes are compared: shards of many
    # blocks would otherwise cost the square of their number.
    dim = max(dims, key=lambda d: len({box.global_offset[d] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box.global_offset[dim])
    for at, box in enumerate(ordered):
        stop = box.global_offset[dim] + box.shape[dim]
        later = at + 1
        while later < len(ordered) and ordered[later].global_offset[dim] < stop:
            yield box, ordered[later]
            later += 1


def _check_box(box: Box, shape: Sequence[int]) -> None:
    if not len(box.global_offset) == len(box.shape) == len(box.local_strides) == len(shape):
        raise LayoutError(
            f"{_say(box)} with local strides {box.local_strides} does not have the "
            f"{len(shape)} dims of the tensor of shape {tuple(shape)}"
        )
    # Stride 0 is refused later, by the marks: only there an element would be covered twice.
    if min(box.local_strides, default=0) < 0:
        raise LayoutError(f"{_say(box)} has negative local strides {box.local_strides}")
    inside = zip(box.global_offset, box.shape, shape, strict=True)
    if not all(o >= 0 and size >= 0 and o + size <= n for o, size, n in inside):
        raise LayoutError(f"{_say(box)} leaves the tensor of shape {tuple(shape)}")


def _overlap(a: Box, b: Box) -> bool:
    sides = zip(a.global_offset, a.shape, b.global_offset, b.shape, strict=True)
    return all(max(i, j) < min(i + n, j + m) for i, n, j, m in sides)


def check_local(layout: ShardLayout, shape: Ints, strides: Ints) -> None:
    """Check that the boxes are the elements of a local tensor, each element in one box.

    Args:
        layout: the layout, already checked against the global shape.
        shape: shape of the local tensor.
        strides: its strides.

    Raises:
        LayoutError: an element of the local tensor is in no box or in two, or a box has elements
            outside of it.
    """
    # Facts of this rank alone, the only ones: whatever is global has been checked before.
    boxes = [box for box in layout.boxes if 0 not in box.shape]
    held = sum(prod(box.shape) for box in boxes)
    if held != prod(shape):
        raise LayoutError(
            f"the boxes of the layout of global shape {layout.global_shape} hold {held} elements, "
            f"the local tensor of shape {shape} has {prod(shape)}"
        )
    # The usual layouts are checked without a look at the memory.
    if len(boxes) == 1 and boxes[0].local_offset == 0:
        box = _pattern(boxes[0].shape, boxes[0].local_strides)
        # Boxes may not share an element with themselves: an expanded tensor (stride 0) goes on to
        # the marks, which refuse it.
        if _are_apart(box) and box == _pattern(shape, strides):
            return
    _check_marks(boxes, shape, strides)


def _check_marks(boxes: Sequence[Box], shape: Ints, strides: Ints) -> None:
    """Mark every element that a box covers: slower, and right for every pattern of strides."""
    extent = _extent(shape, strides)
    # Grows with the local tensor, once per layout: plans are kept.
    marks = torch.zeros(extent, dtype=torch.bool, device="cpu")
    for box in boxes:
        if (
            box.local_offset < 0
            or box.local_offset + _extent(box.shape, box.local_strides) > extent
        ):
            raise LayoutError(
                f"{_say(box)} at local offset {box.local_offset} with strides {box.local_strides} "
                f"leaves the local tensor of shape {shape}, strides {strides}"
            )
        marks.as_strided(box.shape, box.local_strides, box.local_offset).fill_(True)
    covered = marks.as_strided(shape, strides)
    if int(marks.sum()) != prod(shape) or not bool(covered.all()):
        raise LayoutError(
            f"the boxes do not cover every element of the local tensor of shape {shape}, "
            f"strides {strides} exactly once: "
            + ", ".join(f"{_say(b)} at {b.local_offset} by {b.local_strides}" for b in boxes)
        )


def _pattern(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Merge to (stride, extent) from fast to slow: equal patterns have equal addresses."""
    merged: list[tuple[int, int]] = []
    # Sorted by stride, dims that continue one another are neighbours.
    # A dim of one index is left out: its stride addresses nothing, and may be anything.
    for stride, size in sorted((t, n) for n, t in zip(shape, strides, strict=True) if n != 1):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return merged


def _are_apart(pattern: Sequence[tuple[int, int]]) -> bool:
    """Tell whether no two indices share an address (never a wrong yes)."""
    # The farthest address of the faster dims: the next stride has to step over it.
    reach = 0
    for stride, size in pattern:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _say(box: Box) -> str:
    return f"box at {box.global_offset} of shape {box.shape}"
