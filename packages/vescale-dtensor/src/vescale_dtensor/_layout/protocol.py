"""`__vescale_layout__`: tells other packages which boxes of a tensor this rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from torch import Tensor

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.layout import Layout, Order, Shape
from vescale_dtensor._layout.local_shards import local_groups
from vescale_dtensor._layout.placements import Replicate
from vescale_dtensor._layout.shard_geometry import strided_boxes
from vescale_dtensor._torch.worlds import cached


class HeldBox(NamedTuple):
    """One box of the global tensor, and how its elements are stored in the local one.

    Attributes:
        global_offset: first index of the box, per dim.
        shape: extent of the box, per dim.
        local_offset: distance in elements from the first element of the local tensor to that of the
            box.
        local_strides: strides of the box in the local tensor, in elements.
    """

    global_offset: Shape
    shape: Shape
    local_offset: int
    local_strides: Shape


class ShardLayout(NamedTuple):
    """The value that `__vescale_layout__()` returns.

    Attributes:
        global_shape: shape of the global tensor.
        boxes: the boxes that this rank owns; none if its shard is empty.
        replica: index and number of this copy among identical ones.
        memory_order: dims from slowest to fastest in the memory of one device; None is row-major.
    """

    global_shape: Shape
    boxes: tuple[HeldBox, ...]
    replica: tuple[int, int]
    memory_order: Order | None


def shard_layout(layout: Layout, shape: Shape, local: Tensor) -> ShardLayout:
    """Describe what this rank owns, stored in `local`; see `describe_owned`."""
    return describe_owned(layout, shape, local.stride())


def describe_owned(layout: Layout, shape: Shape, strides: Sequence[int]) -> ShardLayout:
    """Describe what this rank owns of a tensor, in a local tensor of these strides.

    Args:
        layout: layout of the tensor.
        shape: global shape.
        strides: strides of the local tensor, in elements.

    Raises:
        UnsupportedError: the tensor is partial: its local values are no elements of it.
        LayoutError: a shard that does not fit the shape.
    """
    if layout.partial:
        raise UnsupportedError(
            f"__vescale_layout__ of a tensor laid out as {layout}: its pieces are terms of a sum, "
            "not elements. Redistribute it to Replicate() or Shard() first."
        )
    if not layout.inside:
        return ShardLayout(shape, (), (0, 1), layout.order)
    boxes = _owned_boxes(layout, shape, tuple(strides))
    return ShardLayout(shape, boxes, _replica(layout), layout.order)


# Cached, as random factories and checkpoints ask at every call. By strides and not by tensor: a
# cache must not keep data alive.
@cached(1024)
def _owned_boxes(layout: Layout, shape: Shape, strides: Sequence[int]) -> tuple[HeldBox, ...]:
    """Return one box for each choice of one strided box per group of dims."""
    per_group = [strided_boxes(group) for group in local_groups(layout, shape)]
    found = []
    for chosen in product(*per_group):
        box = [interval for cell in chosen for interval in cell.box]
        # The local tensor has one dim per group, so there is one stride for each chosen box; it
        # scales the offset and strides that are counted in that dim.
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
    """Return the index of this rank's copy, and how many there are, over all replicated axes."""
    index, count = 0, 1
    for placement, size, at in zip(layout.placements, layout.sizes, layout.coordinate, strict=True):
        # Row-major over the replicated axes, so each copy has one index on all ranks that share it.
        if isinstance(placement, Replicate):
            index, count = index * size + at, count * size
    return index, count
