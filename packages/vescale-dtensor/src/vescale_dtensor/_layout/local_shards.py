"""Local shards of a layout: local shapes, intervals and boxes."""

from __future__ import annotations

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.intervals import Interval
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.mesh import Coordinate
from vescale_dtensor._layout.shard_geometry import Box, DimGroup, check_fits, owned
from vescale_dtensor._torch.worlds import cached


# Both caches are asked for every new shape of a program; layouts are for one rank each, so the keys
# hold the coordinate.
@cached(8192)
def local_groups(layout: Layout, shape: Shape) -> tuple[DimGroup, ...]:
    """Return what this rank owns of a tensor of global `shape`, by group of dims.

    Raises:
        LayoutError: a placement that does not fit the shape, on whichever rank.
    """
    # For all coordinates and not just this one, so that all ranks raise or none does.
    check_fits(layout.placements, layout.sizes, shape)
    return owned(layout.placements, layout.sizes, shape, layout.coordinate)


@cached(8192)
def local_shape(layout: Layout, shape: Shape) -> Shape:
    """Return the shape of this rank's local tensor; dims sharded as one are one dim of it.

    A rank outside of the mesh holds no element, in one dim.
    """
    if not layout.inside:
        return (0,)
    return tuple(group.extent for group in local_groups(layout, shape))


def local_interval(layout: Layout, shape: Shape, dim: int) -> Interval:
    """Return the indices of one dim that this rank owns, where they are one interval.

    Raises:
        UnsupportedError: they are several intervals, or the dim is sharded as one with others.
    """
    for group in local_groups(layout, shape):
        if group.dims == (dim,) and len(group.intervals[0]) == 1:
            return group.intervals[0][0]
    raise UnsupportedError(
        f"what {layout} gives a rank of dim {dim} of {list(shape)} is no interval; redistribute to "
        "Shard() first"
    )


def box_of(layout: Layout, shape: Shape, coordinate: Coordinate) -> Box:
    """Return the part of a tensor of global `shape` at `coordinate`, where it is one box.

    Raises:
        UnsupportedError: it is not one box (see `is_interval`).
    """
    groups = owned(layout.placements, layout.sizes, shape, coordinate)
    return _one_box(groups, layout, shape)


def _one_box(groups: tuple[DimGroup, ...], layout: Layout, shape: Shape) -> Box:
    """Return the box of some groups of one dim and one interval each."""
    if any(len(group.dims) > 1 or len(group.intervals[0]) > 1 for group in groups):
        raise UnsupportedError(
            f"what {layout} gives a rank of {list(shape)} is not one box of the tensor; "
            "redistribute to Shard() first"
        )
    return tuple(group.intervals[0][0] for group in groups)


def box_shape(box: Box) -> Shape:
    """Return the extents of a box."""
    return tuple(high - low for low, high in box)
