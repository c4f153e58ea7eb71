"""Specs: layout, global shape, strides and dtype; all that a wrapper knows besides its data."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from vescale_dtensor._layout.layout import Layout, Order, Shape
from vescale_dtensor._layout.notation import short
from vescale_dtensor._torch.worlds import cached


def strides_of(shape: Shape, order: Order | None) -> Shape:
    """Return the strides of a dense tensor whose memory order is `order` (None: row-major)."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order if order is not None else range(len(shape))):
        strides[dim] = step
        # As torch does: a dim of extent 0 counts as one of extent 1.
        step *= max(1, shape[dim])
    return tuple(strides)


def order_of(shape: Shape, strides: Sequence[int]) -> Order | None:
    """Return the memory order that strides express; None where it is row-major.

    Dims of extent one count by their strides, too: by these torch tells whether the weight of a
    convolution of one pixel, or of one channel, is channels_last. Expanded dims (of stride zero)
    have no place in memory; they stay where they are among the other dims, as in what torch
    computes from such a tensor.
    """
    real = [d for d in range(len(shape)) if strides[d]]
    # Of two dims with one stride, that of extent one is the faster: were it the slower, its stride
    # would be that of the other times the other's extent.
    ordered = sorted(real, key=lambda d: (-strides[d], shape[d] == 1, d))
    if ordered == real or prod(shape) == 0:
        return None
    # Expanded dims keep their positions; the others are filled in around them, sorted.
    places = iter(ordered)
    return tuple([next(places) if strides[d] else d for d in range(len(shape))])


class TensorMeta:
    """What the C++ constructor of a wrapper reads of a spec: global shape, strides, dtype."""

    # These names are torch's: `_dtensor__new__` reads the attributes of `spec.tensor_meta`.
    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, shape: torch.Size, stride: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.stride = stride
        self.dtype = dtype


class Spec:
    """A layout with the global shape and dtype: all that a wrapper knows besides its data.

    Interned by `spec_of` (except for tensors with gaps). Compiled calls are looked up by spec,
    which compares by identity.

    Attributes:
        has_known_total: whether this is the twin that `with_known_total` returns.
        base: the spec whose twin this is, or this spec itself.
        has_gaps: whether one device would hold the tensor with gaps between its elements: a view of
            some columns, for example. `contiguous()` of it is a copy, whatever the local tensors
            are like.
    """

    __slots__ = (
        "_reduced",
        "base",
        "has_gaps",
        "has_known_total",
        "layout",
        "ndim",
        "shape",
        "tensor_meta",
    )

    def __init__(
        self,
        layout: Layout,
        shape: torch.Size,
        dtype: torch.dtype,
        strides: Shape | None = None,
    ) -> None:
        self.layout = layout
        self.shape = shape
        self.ndim = len(shape)
        # Strides are only given where they are not those of a dense tensor; see `with_strides`.
        self.has_gaps = strides is not None
        dense = strides_of(shape, layout.order) if strides is None else strides
        self.tensor_meta = TensorMeta(shape, dense, dtype)
        self._reduced: Spec | None = None
        self.base = self
        self.has_known_total = False

    @property
    def with_known_total(self) -> Spec:
        """The spec of the same tensor once its reduction is cached on it.

        A distinct object, so that compiled calls for the unreduced spec do not match, which would
        reduce again; see `_autograd/redistribution_cache.py`.
        """
        if self._reduced is None:
            strides = self.tensor_meta.stride if self.has_gaps else None
            # One twin per spec, kept for good: another one at each call would never hit a compiled
            # call. It is its own twin, so the property may be asked twice.
            twin = Spec(self.layout, self.shape, self.tensor_meta.dtype, strides)
            twin.base, twin.has_known_total = self, True
            twin._reduced, self._reduced = twin, twin
        return self._reduced

    @property
    def dense(self) -> Spec:
        """The spec of what torch computes from such a tensor: in the same order, without gaps."""
        if not self.has_gaps:
            return self
        return spec_of(self.layout, tuple(self.shape), self.tensor_meta.dtype)

    def __repr__(self) -> str:
        return f"Spec({self})"

    def __str__(self) -> str:
        return short(self.shape, self.tensor_meta.dtype, self.layout)


# Interned, since the fast path finds compiled calls by the identity of a spec. A spec that the
# table dropped is made anew: its calls are compiled again, which costs time only.
@cached(16384)
def spec_of(layout: Layout, shape: Shape, dtype: torch.dtype) -> Spec:
    """Return the interned spec of a tensor."""
    return Spec(layout, torch.Size(shape), dtype)


@cached(4096)
def with_strides(spec: Spec, strides: Shape) -> Spec:
    """Return the spec of a view that has these strides on one device."""
    usual = spec.tensor_meta.stride
    # Strides of dims of extent one address nothing, so they make no gaps.
    lies = [s for s, n in zip(strides, spec.shape, strict=True) if n != 1]
    wanted = [s for s, n in zip(usual, spec.shape, strict=True) if n != 1]
    if lies == wanted or prod(spec.shape) == 0:
        return spec
    return Spec(spec.layout, spec.shape, spec.tensor_meta.dtype, strides)
