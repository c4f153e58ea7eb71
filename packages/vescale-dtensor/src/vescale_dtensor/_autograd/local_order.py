"""The memory order of a global tensor, and how it follows from its local tensors' strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout, Order, Shape
from vescale_dtensor._layout.placement_base import Sharded
from vescale_dtensor._layout.placements import Shard
from vescale_dtensor._layout.spec import order_of, strides_of
from vescale_dtensor._torch.overridable import overridable
from vescale_dtensor._torch.worlds import cached


def in_memory_order(local: Tensor, order: Order | None) -> Tensor:
    """A local tensor with this memory order and without gaps: itself if it is so already."""
    # Flat shards (of several dims as one) have other dims than the global tensor. An empty tensor
    # has nothing to reorder.
    if order is None or len(order) != local.ndim or local.numel() == 0:
        return local
    if tuple(local.stride()) == strides_of(tuple(local.shape), order):
        return local
    back = sorted(range(local.ndim), key=order.__getitem__)
    # A clone: it also gives dims of extent one the strides of their place, which `contiguous`
    # leaves as they are.
    return local.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


@overridable
def expanded_again(local: Tensor, order: Order | None, dims: tuple[int, ...]) -> Tensor:
    """A tensor that was gathered in full, with stride 0 in the dims that are expanded."""
    result: Tensor = _ExpandFunction.apply(local, order, dims)  # type: ignore[no-untyped-call]
    return result


class _ExpandFunction(torch.autograd.Function):
    """The same values: each element has its own gradient, as on one device."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, order: Order | None, dims: tuple[int, ...]) -> Tensor:
        one = local
        for dim in dims:  # one index of each, which stands for all of them
            one = one.narrow(dim, 0, 1)
        return in_memory_order(one.contiguous(), order).expand(local.shape).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def told_order(local: Tensor, layout: Layout, shape: Shape) -> Order | None:
    """The global memory order, as far as it follows from the strides of the local tensors.

    Only what all ranks can know counts, so that they get the same order without communication. The
    place of a dim does not follow from strides if some rank has only one index of it, and the order
    is row-major if a rank may hold nothing, as its strides mean nothing.

    Args:
        local: this rank's local tensor.
        layout: the global tensor's layout.
        shape: global shape.

    Returns:
        The order; None: row-major.
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
    """`told_order` for computed local tensors: only if all ranks hold one shape, else row-major.

    Kernels choose the memory order of results by sizes (a convolution of 15 images may have another
    than one of 17), so ranks with local tensors of different sizes might get different orders.
    """
    return told_order(local, layout, shape) if _is_even(layout, shape) else None


@cached(4096)
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


@cached(4096)
def _telling_dims(layout: Layout, shape: Shape) -> tuple[int, ...]:
    """The dims whose place in memory follows from strides on every rank.

    Empty if a rank may hold nothing.
    """
    least = [_least_extent(layout, shape, dim) for dim in range(len(shape))]
    if 0 in least:
        return ()
    # A dim whose global extent is one has one index on every rank. Its strides count: by them torch
    # decides whether a tensor is channels_last.
    return tuple(dim for dim, n in enumerate(least) if n > 1 or shape[dim] == 1)


def _least_extent(layout: Layout, shape: Shape, dim: int) -> int:
    """The smallest extent of a dim on any rank; zero where no simple formula gives it."""
    extent = shape[dim]
    cuts = [
        (placement, size)
        for placement, size in zip(layout.placements, layout.sizes, strict=True)
        if isinstance(placement, Sharded) and dim in placement.cut_dims() and size > 1
    ]
    for index, (placement, size) in enumerate(cuts):
        # Interleaved and ragged shards, and uneven shards that a later axis shards again.
        if type(placement) is not Shard or (extent % size and index < len(cuts) - 1):
            return 0
        # All but the last coordinate hold ceil(extent / size), and the last what remains.
        extent = max(0, extent - -(-extent // size) * (size - 1))
    return extent
