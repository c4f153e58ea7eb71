"""The map of the portable policy begins one element late, but at the beginning of a tensor."""

from dataclasses import replace

from vescale_rng._portable import tiles

right = tiles._tile


def wrong(box, order, strides):
    tile = right(box, order, strides)
    return replace(tile, start=tile.start + 1) if tile.start else tile


tiles._tile = wrong
