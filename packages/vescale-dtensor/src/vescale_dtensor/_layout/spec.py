"""A layout together with a global shape, strides and dtype: what a wrapper is, but for its data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch

from vescale_dtensor._layout.layout import Layout, Order, Shape
from vescale_dtensor._layout.notation import short


def strides_of(shape: Shape, order: Order | None) -> Shape:
    """Strides of a dense tensor whose dims lie in memory in `order` (None: row-major)."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order if order is not None else range(len(shape))):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def order_of(shape: Shape, strides: Sequence[int]) -> Order | None:
    """The memory order that strides express; None where it is row-major.

    Dims of extent one count by their strides, too: by these torch tells whether the weight of a
    convolution of one pixel, or of one channel, is channels_last. Expanded dims (of stride zero)
    have no place in memory, and keep their place among the others as what torch makes of them does.
    """
    real = [d for d in range(len(shape)) if strides[d]]
    # What is faster than a dim of extent one and of the same stride would have made it longer.
    ordered = sorted(real, key=lambda d: (-strides[d], shape[d] == 1, d))
    if ordered == real or prod(shape) == 0:
        return None
    places = iter(ordered)
    return tuple(next(places) if strides[d] else d for d in range(len(shape)))


class TensorMeta:
    """What the C++ constructor of a wrapper reads: global shape, strides, dtype."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, shape: torch.Size, stride: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.stride = stride
        self.dtype = dtype


class Spec:
    """A layout with the global shape and dtype: all that a wrapper knows besides its data.

    Attributes:
        has_known_total: whether this is the twin that `with_known_total` gives.
        base: the spec that it is the twin of, or this one.
        has_gaps: whether one device would hold it with gaps between its elements: a view of some
            columns, say. `contiguous()` of that is a copy, wherever the pieces lie here.
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
        self.has_gaps = strides is not None
        dense = strides_of(shape, layout.order) if strides is None else strides
        self.tensor_meta = TensorMeta(shape, dense, dtype)
        self._reduced: Spec | None = None
        self.base = self
        self.has_known_total = False

    @property
    def with_known_total(self) -> Spec:
        """The same spec, of a tensor whose total is known (see `_cached_redistribution`).

        A distinct object, so that compiled calls for the unreduced spec do not match.
        """
        if self._reduced is None:
            strides = self.tensor_meta.stride if self.has_gaps else None
            twin = Spec(self.layout, self.shape, self.tensor_meta.dtype, strides)
            twin.base, twin.has_known_total = self, True
            twin._reduced, self._reduced = twin, twin
        return self._reduced

    @property
    def dense(self) -> Spec:
        """The spec of what torch makes of such a tensor: in the same order, without gaps."""
        if not self.has_gaps:
            return self
        return spec_of(self.layout, tuple(self.shape), self.tensor_meta.dtype)

    def __repr__(self) -> str:
        return f"Spec({short(self.shape, self.tensor_meta.dtype, self.layout)})"


@lru_cache(maxsize=16384)
def spec_of(layout: Layout, shape: Shape, dtype: torch.dtype) -> Spec:
    """The spec of a tensor: interned, bounded."""
    return Spec(layout, torch.Size(shape), dtype)


@lru_cache(maxsize=4096)
def with_strides(spec: Spec, strides: Shape) -> Spec:
    """The spec of a view that has these strides on one device."""
    usual = spec.tensor_meta.stride
    lies = [s for s, n in zip(strides, spec.shape, strict=True) if n != 1]
    wanted = [s for s, n in zip(usual, spec.shape, strict=True) if n != 1]
    if lies == wanted or prod(spec.shape) == 0:
        return spec
    return Spec(spec.layout, spec.shape, spec.tensor_meta.dtype, strides)
