"""Draws that are no distribution of one tensor: probabilities by element, permutations, races."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from vescale_rng._cpu.stream_ops import Multinomial
from vescale_rng._distributions import Exponential
from vescale_rng._layout.layout import Box, Ints, ShardLayout, dense_strides, whole
from vescale_rng._portable.arrays import Arrays
from vescale_rng._portable.fill_boxes import arrays_of, fill_by_arrays, fill_portable, parts, store
from vescale_rng._portable.maps import Map

# Elements of the races that are run at once.
_RACES = 1 << 20
# The last of all times.
_LATEST = torch.finfo(torch.float64).max


def bernoulli_of(
    local: torch.Tensor, p: torch.Tensor, layout: ShardLayout, key: int | torch.Tensor
) -> None:
    """Write 1 with the probability of each element, else 0.

    Args:
        local: zeros and ones are written to it.
        p: probabilities of the elements of `local`, with the same strides.
        layout: which elements they are.
        key: see `draw_key`.
    """
    kind = Map(False, _fractions)
    arrays, blocks = arrays_of(key)
    for part in parts(layout, kind, blocks):
        made = part.of(arrays, kind.of(arrays, part.words(arrays, key)))
        values = torch.as_tensor(made, device=local.device)
        store(local, part.tile, values < part.tile.of(p).double(), kind)


def _fractions(arrays: Arrays, words: Any) -> Any:
    # Exact, as is the comparison with any probability of at most 53 bits.
    values = arrays.floats(words, 64)
    values *= 2.0**-32
    return values


def permutation(n: int, key: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the places of 0 to n - 1 in the order of their words, equal ones by place: int64."""
    words = torch.empty(n, dtype=torch.int64, device=device)
    fill_by_arrays(words, Map(True, _in_signed_order), whole((n,)), key)
    # Stable, or equal words would be ordered as each device's sort pleases.
    return torch.sort(words, stable=True).indices


def _in_signed_order(arrays: Arrays, words: Any) -> Any:
    # Less 2**63: signed numbers then order as the unsigned ones did.
    return arrays.modulo(arrays.plus(words, 1 << 63, 64), 1 << 64, 64)


def winners(
    weights: torch.Tensor, op: Multinomial, layout: ShardLayout, key: int | torch.Tensor
) -> torch.Tensor:
    """Sample categories by exponential races: the first to arrive at rate `weights` win.

    Args:
        weights: local rows, each complete: (rows, categories), floating point.
        op: with replacement every sample is a race of its own, else there is one race.
        layout: which rows of the global (rows, categories) they are.
        key: see `draw_key`.

    Returns:
        int64, (local rows, samples), in order of arrival where there is one race.
    """
    result = torch.empty(len(weights), op.num_samples, dtype=torch.int64, device=weights.device)
    races = op.num_samples if op.replacement else 1
    kind = torch.promote_types(weights.dtype, torch.float32)
    for race in _races(layout, races):
        times = torch.empty(race.shape, dtype=kind, device=weights.device)
        box = Box(race.global_offset, race.shape, 0, dense_strides(race.shape))
        shape = (layout.global_shape[0], races, layout.global_shape[1])
        fill_portable(times, Exponential(1.0), ShardLayout(shape, (box,)), key)
        rows = slice(race.local_offset, race.local_offset + race.shape[0])
        # An exponential over its rate: the first to arrive is chosen with the rate's probability.
        # In float64, where tiny rates have times as well; those of rate zero never arrive.
        rates = weights[rows].double().unsqueeze(1)
        times = (times / rates).clamp(max=_LATEST).masked_fill(rates == 0, torch.inf)
        if op.replacement:
            begin = race.global_offset[1]
            result[rows, begin : begin + race.shape[1]] = times.argmin(-1)
        else:
            result[rows] = torch.sort(times[:, 0], stable=True).indices[:, : op.num_samples]
    return result


def _races(layout: ShardLayout, races: int) -> Iterator[Box]:
    """Yield boxes of (rows, races, categories), bounded; `local_offset` counts local rows."""
    categories = layout.global_shape[1]
    for box in layout.boxes:
        first = box.local_offset // max(1, box.local_strides[0])
        at_once = max(1, _RACES // max(1, categories))
        steps = min(races, at_once)
        rows = max(1, at_once // steps)
        for row in range(0, box.shape[0], rows):
            for race in range(0, races, steps):
                shape: Ints = (min(rows, box.shape[0] - row), min(steps, races - race), categories)
                if prod(shape):
                    offset = (box.global_offset[0] + row, race, 0)
                    yield Box(offset, shape, first + row, ())
