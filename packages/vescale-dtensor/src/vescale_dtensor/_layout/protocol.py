"""`__vescale_layout__`: tells other packages which boxes of a global tensor this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from torch import Tensor

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.layout import Layout, Order, Shape
from vescale_dtensor._layout.local_shards import local_groups
from vescale_dtensor._layout.placements import Replicate
from vescale_dtensor._layout.shard_geometry import strided_boxes


class HeldBox(NamedTuple):
    """One box of the global tensor, and how its elements lie in the local one.

    Attributes:
        global_offset: first index of the box, per dim.
        shape: extent of the box, per dim.
        local_offset: elements between the local tensor's first element and the box's.
        local_strides: strides of the box in the local tensor, in elements.
    """

    global_offset: Shape
    shape: Shape
    local_offset: int
    local_strides: Shape


class ShardLayout(NamedTuple):
    """What `__vescale_layout__()` returns.

    Attributes:
        global_shape: shape of the whole tensor.
        boxes: the pieces held here; none if the shard is empty.
        replica: index and count of this copy among identical ones.
        memory_order: dims from slowest to fastest in the memory of one device; None: row-major.
    """

    global_shape: Shape
    boxes: tuple[HeldBox, ...]
    replica: tuple[int, int]
    memory_order: Order | None


def shard_layout(layout: Layout, shape: Shape, local: Tensor) -> ShardLayout:
    """`described` by the strides of the local tensor."""
    return described(layout, shape, local.stride())


def described(layout: Layout, shape: Shape, strides: Sequence[int]) -> ShardLayout:
    """Describe the piece of a tensor that this rank holds in a local tensor of these strides.

    Raises:
        UnsupportedError: the tensor is partial: what a rank holds are terms, not elements.
    """
    if layout.partial:
        raise UnsupportedError(
            f"__vescale_layout__ of a tensor laid out as {layout}: its pieces are terms of a sum, "
            "not elements. Redistribute it to Replicate() or Shard() first."
        )
    boxes = _held_boxes(layout, shape, tuple(strides))
    return ShardLayout(shape, boxes, _replica(layout), layout.order)


@lru_cache(maxsize=1024)
def _held_boxes(layout: Layout, shape: Shape, strides: Sequence[int]) -> tuple[HeldBox, ...]:
    """One box for each choice of one cell per group of dims; strides are the local tensor's."""
    along = [strided_boxes(group) for group in local_groups(layout, shape)]
    found = []
    for chosen in product(*along):
        box = [interval for cell in chosen for interval in cell.box]
        placed = list(zip(chosen, strides, strict=True))
        found.append(
            HeldBox(
                global_offset=tuple(low for low, _ in box),
                shape=tuple(high - low for low, high in box),
                local_offset=sum(cell.offset * step for cell, step in placed),
                local_strides=tuple(n * step for cell, step in placed for n in cell.strides),
            )
        )
    return tuple(found)


def _replica(layout: Layout) -> tuple[int, int]:
    index, count = 0, 1
    for placement, size, at in zip(layout.placements, layout.sizes, layout.coordinate, strict=True):
        if isinstance(placement, Replicate):
            index, count = index * size + at, count * size
    return index, count
