"""Random numbers of a piece of a tensor, beside torch filling the whole, or as many numbers.

Filling the whole on every rank is what it takes without vescale_rng to have one device's numbers;
filling as many as the piece holds is the least that any random numbers cost, one device's or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import vescale_rng
from torch.distributed.tensor import Shard
from vescale_rng import Bernoulli, Distribution, Normal, Uniform

from tools.bench import Ratio
from tools.bench._timing import microseconds

RANKS = 4
LAST = (RANKS - 1,)
DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": Uniform(0.0, 1.0),
    "normal": Normal(0.0, 1.0),
    "bernoulli": Bernoulli(0.9),
}


def measure(extent: int = 4096, rounds: int = 5) -> Iterator[Ratio]:
    """A quarter of a square matrix, cut by rows and by columns, as the last of four ranks."""
    torch.set_num_threads(1)
    whole = torch.empty(extent, extent)
    for name, distribution in DISTRIBUTIONS.items():
        for dim, cut in enumerate(("rows", "columns")):
            layout = vescale_rng.layout_of((extent, extent), [Shard(dim)], (RANKS,), LAST)
            piece = whole.chunk(RANKS, dim)[-1].clone()
            cost = microseconds(
                {
                    "ours": partial(vescale_rng.fill_, piece, distribution, layout),
                    "the whole by torch": partial(distribution.draw, whole, None),
                    "as many by torch": partial(distribution.draw, piece, None),
                },
                rounds=rounds,
            )
            ours = cost.pop("ours")
            for against, reference in cost.items():
                yield Ratio(f"{name}, 1/{RANKS} by {cut}", ours, reference, "us", against)
