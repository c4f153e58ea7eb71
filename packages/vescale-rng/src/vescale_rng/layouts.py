"""Layouts: which elements of a tensor a rank holds. The same names are in `vescale_rng`."""

from typing import Any

from vescale_rng._layout.former_names import renamed
from vescale_rng._layout.layout import Box, BoxLike, LayoutLike, ShardLayout, as_layout, whole
from vescale_rng._layout.of_tensor import layout_of_tensor
from vescale_rng._layout.placements import layout_of, layout_of_slices

__all__ = [
    "Box",
    "BoxLike",
    "LayoutLike",
    "ShardLayout",
    "as_layout",
    "layout_of",
    "layout_of_slices",
    "layout_of_tensor",
    "whole",
]


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
