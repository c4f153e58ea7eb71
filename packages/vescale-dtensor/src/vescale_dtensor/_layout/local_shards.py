"""Which part of a tensor the ranks of a layout hold: local shapes, intervals, boxes."""

from __future__ import annotations

from functools import lru_cache

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.mesh import Coordinate
from vescale_dtensor._layout.placements import (
    Interval,
)
from vescale_dtensor._layout.shard_geometry import Box, DimGroup, check_fits, owned


@lru_cache(maxsize=8192)
def local_groups(layout: Layout, shape: Shape) -> tuple[DimGroup, ...]:
    """What this rank holds of a tensor of global `shape`, group of dims by group of dims.

    Raises:
        LayoutError: a cut that does not fit the shape, on whichever rank.
    """
    check_fits(layout.placements, layout.sizes, shape)
    return owned(layout.placements, layout.sizes, shape, layout.coordinate)


@lru_cache(maxsize=8192)
def local_shape(layout: Layout, shape: Shape) -> Shape:
    """Shape of the piece that this rank holds; dims that are cut as one are one dim of it."""
    return tuple(group.extent for group in local_groups(layout, shape))


def local_interval(layout: Layout, shape: Shape, dim: int) -> Interval:
    """The indices of one dim that this rank holds, where they are an interval; others may not be.

    Raises:
        UnsupportedError: they are not.
    """
    for group in local_groups(layout, shape):
        if group.dims == (dim,) and len(group.intervals[0]) == 1:
            return group.intervals[0][0]
    raise UnsupportedError(
        f"what {layout} gives a rank of dim {dim} of {list(shape)} is no interval; redistribute to "
        "Shard() first"
    )


def box_of(layout: Layout, shape: Shape, coordinate: Coordinate) -> Box:
    """The part of a tensor of global `shape` at `coordinate`, where that is one box.

    Raises:
        UnsupportedError: a placement for which it may be several (see `is_interval`).
    """
    groups = owned(layout.placements, layout.sizes, shape, coordinate)
    return _one_box(groups, layout, shape)


def _one_box(groups: tuple[DimGroup, ...], layout: Layout, shape: Shape) -> Box:
    if any(len(group.dims) > 1 or len(group.intervals[0]) > 1 for group in groups):
        raise UnsupportedError(
            f"what {layout} gives a rank of {list(shape)} is not one box of the tensor; "
            "redistribute to Shard() first"
        )
    return tuple(group.intervals[0][0] for group in groups)


def box_shape(box: Box) -> Shape:
    """Extents of a box."""
    return tuple(high - low for low, high in box)
