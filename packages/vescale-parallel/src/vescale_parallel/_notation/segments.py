"""Lists the coordinates that hold elements along one dim, in the order of the dim."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vescale_parallel._notation.layout import RuleLayout, block_sizes

Place = tuple[tuple[str, int], ...]
"""Coordinates on the axes that shard a dim, in mesh order."""


@dataclass(frozen=True)
class Segment:
    """Elements of a dim that lie side by side on the same ranks.

    Attributes:
        low: the first of them.
        high: the first behind them.
        place: the coordinates that hold them; empty where every rank does.
    """

    low: int
    high: int
    place: Place = ()

    @property
    def extent(self) -> int:
        """How many elements."""
        return self.high - self.low


def segments_of(
    layout: RuleLayout, shape: Sequence[int], dim: int, mesh_sizes: Sequence[tuple[str, int]]
) -> list[Segment]:
    """Return the parts of a dim in order; they cover it, and none is empty.

    Shards are those of `torch.chunk`: ceil(n / k) each, the last ones smaller or empty. Axes that
    shard one dim nest in mesh order, and of a dim of several blocks each block is sharded.

    Args:
        layout: of the tensor.
        shape: its global shape.
        dim: counted from 0.
        mesh_sizes: axis and size, in mesh order.
    """
    found = [Segment(0, shape[dim])]
    for axis, size in mesh_sizes:
        if layout.dim_of(axis, len(shape)) != dim:
            continue
        # No other axis shards a dim of several blocks, so that the one segment is all of it.
        blocks = layout.blocks_of(axis)
        if len(blocks) > 1:
            found = _side_by_side(block_sizes(layout, axis, shape[dim]))
        found = [part for one in found for part in _sharded(one, axis, size)]
    return [one for one in found if one.extent]


def _side_by_side(extents: Sequence[int]) -> list[Segment]:
    ends = [sum(extents[: at + 1]) for at in range(len(extents))]
    return [Segment(end - extent, end) for extent, end in zip(extents, ends, strict=True)]


def _sharded(one: Segment, axis: str, size: int) -> list[Segment]:
    each = -(-one.extent // size)
    cuts = [min(one.low + at * each, one.high) for at in range(size + 1)]
    return [
        Segment(low, high, (*one.place, (axis, at)))
        for at, (low, high) in enumerate(pairwise(cuts))
    ]
