"""Layouts as vescale_rng takes them: one object per layout, so that it can cache by identity."""

from __future__ import annotations

from functools import lru_cache

import vescale_rng
from torch import Tensor

from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.protocol import described
from vescale_dtensor._layout.spec import Spec


def random_layout(layout: Layout, shape: Shape, local: Tensor) -> vescale_rng.Layout:
    """The piece of a tensor of global `shape` that this rank draws, as it lies in `local`.

    Raises:
        UnsupportedError: the tensor is partial, so that it has no elements to draw.
    """
    return _random_layout(layout, tuple(shape), local.stride())


@lru_cache(maxsize=1024)
def rng_layout_of(spec: Spec, strides: Shape) -> vescale_rng.Layout:
    """`random_layout` of a tensor of this spec whose piece has these strides."""
    return _random_layout(spec.layout, tuple(spec.shape), strides)


@lru_cache(maxsize=1024)
def _random_layout(layout: Layout, shape: Shape, strides: Shape) -> vescale_rng.Layout:
    return vescale_rng.as_layout(described(layout, shape, strides))
