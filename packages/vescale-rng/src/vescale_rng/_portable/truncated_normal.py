"""Normals within bounds, by rejection: every element tries until it is accepted, by itself.

Each try takes its words under a stream of its own, so that what one element needs depends on no
other, and a rank computes what it holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import erf, sqrt
from typing import Any

import numpy as np
import torch

from vescale_rng._cpu.rejection import Bounds
from vescale_rng._layout.layout import ShardLayout
from vescale_rng._portable.arrays import Arrays
from vescale_rng._portable.fill_boxes import TileBlocks, arrays_of, parts, store
from vescale_rng._portable.functions import DOUBLE, SINGLE, Format
from vescale_rng._portable.maps import (
    Map,
    normal_values,
    standard_exponential,
    uniform_values,
)

# torch.nn.init's choice: below this, candidates are uniform within the bounds.
_NORMAL_FROM = 0.3

Words = Callable[[int], Any]


@dataclass(frozen=True)
class _Tries:
    """How one try makes a candidate.

    Attributes:
        kind: the format that candidates are computed in.
        bounds: the distribution and its interval.
    """

    kind: Format
    bounds: Bounds

    @property
    def of_normals(self) -> bool:
        """Whether candidates are normals, kept within the bounds."""
        mean, std, low, high = self.bounds
        below = [(1.0 + erf((bound - mean) / std / sqrt(2.0))) / 2.0 for bound in (low, high)]
        return below[1] - below[0] > _NORMAL_FROM

    def values(self, arrays: Arrays, words: Words, number: int) -> tuple[Any, Any]:
        """Return candidates of try `number`, and which are accepted, in the order of the words."""
        with np.errstate(all="ignore"):
            return (self._normals if self.of_normals else self._uniforms)(arrays, words, number)

    def _normals(self, arrays: Arrays, words: Words, number: int) -> tuple[Any, Any]:
        nearest = self.kind.nearest
        mean, std, low, high = map(nearest, self.bounds)
        values = normal_values(self.kind, mean, std, arrays, words(number))
        return values, (values >= low) & (values <= high)

    def _uniforms(self, arrays: Arrays, words: Words, number: int) -> tuple[Any, Any]:
        kind, nearest = self.kind, self.kind.nearest
        mean, std, low, high = self.bounds
        extent = nearest(nearest(high) - nearest(low))
        # Two streams for each try: a candidate and the time that decides on it share no word.
        values = uniform_values(kind, nearest(low), extent, arrays, words(2 * number))
        times = standard_exponential(kind, arrays, words(2 * number + 1))
        # The density of a normal, relative to that at the mode of the interval.
        steps = values - nearest(mean)
        steps /= nearest(std)
        steps *= steps
        steps *= 0.5
        mode = (max(low, min(mean, high)) - mean) / std
        steps -= nearest(0.5 * mode * mode)
        return values, times >= steps


def truncated_normal(
    local: torch.Tensor, bounds: Bounds, layout: ShardLayout, key: int | torch.Tensor
) -> None:
    """Fill `local` with its part of a tensor of normals within bounds.

    Args:
        local: of floating point.
        bounds: the distribution and its interval.
        layout: which elements `local` holds.
        key: see `draw_key`.
    """
    wide = local.dtype == torch.float64
    tries = _Tries(DOUBLE if wide else SINGLE, bounds)
    arrays, blocks = arrays_of(key)
    kind = Map(wide, _nothing)
    for part in parts(layout, kind, blocks):
        found = tries.values(arrays, partial(part.words, arrays, key), 0)
        values, accepted = (part.of(arrays, each) for each in found)
        # Where they are: without a device torch would move them to its default one.
        values = torch.as_tensor(values, device=local.device).reshape(-1)
        rejected = ~torch.as_tensor(accepted, device=local.device).reshape(-1)
        _try_again(tries, part, rejected, values, key)
        store(local, part.tile, values.reshape(part.tile.sizes), kind)


def _nothing(arrays: Arrays, words: Any) -> Any:
    raise AssertionError("tries make the values")


def _try_again(
    tries: _Tries, part: TileBlocks, rejected: torch.Tensor, values: torch.Tensor, key: Any
) -> None:
    """Replace the rejected values, however many tries it takes."""
    arrays, _ = arrays_of(key)
    where = rejected.nonzero()[:, 0]
    if not len(where):
        return
    # Few are rejected: from here on elements are computed one by one, at their places.
    places = torch.as_tensor(part.places(arrays), device=values.device)[where]
    number = 1
    while len(where):
        blocks = _plain(places // part.per_block, key)
        columns = (places % part.per_block)[:, None]
        words = partial(part.words_of_blocks, arrays, key, blocks)
        found = [arrays.in_order(each) for each in tries.values(arrays, words, number)]
        candidates, accepted = (
            torch.as_tensor(each, device=values.device).gather(1, columns)[:, 0] for each in found
        )
        values[where[accepted]] = candidates[accepted]
        where, places = where[~accepted], places[~accepted]
        number += 1


def _plain(places: torch.Tensor, key: Any) -> Any:
    return places.numpy() if isinstance(key, int) else places
