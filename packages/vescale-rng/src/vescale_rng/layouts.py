"""Layouts: which elements of a tensor a rank holds. The same names are in `vescale_rng`."""

from vescale_rng._layout.layout import Box, BoxLike, Layout, LayoutLike, as_layout, whole
from vescale_rng._layout.of_tensor import layout_of_tensor
from vescale_rng._layout.placements import layout_of

__all__ = [
    "Box",
    "BoxLike",
    "Layout",
    "LayoutLike",
    "as_layout",
    "layout_of",
    "layout_of_tensor",
    "whole",
]
