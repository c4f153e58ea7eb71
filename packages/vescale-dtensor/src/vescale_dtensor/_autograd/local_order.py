"""The memory order of a global tensor and that of the local tensors it is made of."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout, Order, Shape
from vescale_dtensor._layout.placements import Shard, Sharded
from vescale_dtensor._layout.spec import order_of, strides_of


def in_memory_order(local: Tensor, order: Order | None) -> Tensor:
    """A local tensor whose dims lie in this order, without gaps: the same one where they do."""
    if order is None or len(order) != local.ndim or local.numel() == 0:
        return local  # shards that are flat have dims of their own
    if tuple(local.stride()) == strides_of(tuple(local.shape), order):
        return local
    back = sorted(range(local.ndim), key=order.__getitem__)
    # A clone: dims of extent one get strides of their place, too, which `contiguous` leaves.
    return local.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def told_order(local: Tensor, layout: Layout, shape: Shape) -> Order | None:
    """The memory order of a global tensor of which this rank holds `local`, as far as that tells.

    Only what every rank can tell counts, so that all come to the same without asking: of a dim of
    which some rank holds one index no rank takes the place in memory from its strides, and where a
    rank may hold nothing at all, whose strides mean nothing, the order is row-major.
    """
    dims = _telling_dims(layout, shape)
    if not dims or local.ndim != len(shape):
        return None
    inner = order_of(tuple(local.shape[d] for d in dims), [local.stride(d) for d in dims])
    if inner is None:
        return None
    order = list(range(local.ndim))
    for place, told in zip(dims, inner, strict=True):
        order[place] = dims[told]
    return tuple(order)


def computed_order(local: Tensor, layout: Layout, shape: Shape) -> Order | None:
    """`told_order` of what ranks have computed: of even shards only, else row-major.

    Kernels choose the order by sizes (a convolution of 15 images lies otherwise than one of 17), so
    ranks that hold other sizes might come to other orders.
    """
    return told_order(local, layout, shape) if _is_even(layout, shape) else None


@lru_cache(maxsize=4096)
def _is_even(layout: Layout, shape: Shape) -> bool:
    """Whether all ranks hold the same shape."""
    extents = list(shape)
    for placement, size in zip(layout.placements, layout.sizes, strict=True):
        if not isinstance(placement, Sharded) or size == 1:
            continue
        if type(placement) is not Shard or extents[placement.dim] % size:
            return False
        extents[placement.dim] //= size
    return True


@lru_cache(maxsize=4096)
def _telling_dims(layout: Layout, shape: Shape) -> tuple[int, ...]:
    """The dims whose place in memory every rank's strides tell; none where a rank may be empty."""
    least = [_least_extent(layout, shape, dim) for dim in range(len(shape))]
    if 0 in least:
        return ()
    return tuple(dim for dim, n in enumerate(least) if n > 1 or shape[dim] == 1)


def _least_extent(layout: Layout, shape: Shape, dim: int) -> int:
    """The least that a rank holds of a dim; zero where that is not easily said."""
    extent = shape[dim]
    cuts = [
        (placement, size)
        for placement, size in zip(layout.placements, layout.sizes, strict=True)
        if isinstance(placement, Sharded) and dim in placement.cut_dims() and size > 1
    ]
    for index, (placement, size) in enumerate(cuts):
        if type(placement) is not Shard or (extent % size and index < len(cuts) - 1):
            return 0
        extent = max(0, extent - -(-extent // size) * (size - 1))
    return extent
