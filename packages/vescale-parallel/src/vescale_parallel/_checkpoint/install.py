"""Regions put into a model; with a budget, how many of them run is decided at each batch."""

import functools
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from vescale_comm.nested import named_tensors_within
from vescale_dtensor import untraced

from vescale_parallel._checkpoint.region import Region
from vescale_parallel._checkpoint.resolve import RegionRow
from vescale_parallel._common.pickle_refusal import NotPickled


def install_regions(
    model: nn.Module, rows: Sequence[RegionRow], device_type: str
) -> dict[str, Region]:
    """Let the modules of the rows be recomputed; returns their regions by name."""
    regions = {
        row.module: Region(row.module, model.get_submodule(row.module), row.saved, device_type)
        for row in rows
    }
    for region in regions.values():
        # Of the object, and not of its class: other modules of the class run as they did.
        region.module.forward = region
    return regions


class Budget(NotPickled):
    """The root's forward pre-hook: as many regions are on as the tokens of this batch ask for.

    Args:
        regions: in the order of the model.
        needed: how many of them have to be recomputed for that many tokens of the global batch.
    """

    def __init__(self, regions: Sequence[Region], needed: Callable[[int], int]) -> None:
        self.regions = list(regions)
        self.needed = functools.lru_cache(maxsize=64)(needed)

    @untraced
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Decide; alike on all ranks, as their batches have one global shape."""
        found = named_tensors_within((args, kwargs)).values()
        # Activations of the last ones are freed first in backward, so the first ones are chosen.
        number = self.needed(tokens_of(list(found)))
        # At each batch, as tokens may differ from batch to batch: also back, where a smaller one
        # comes.
        for position, region in enumerate(self.regions):
            region.is_on = position < number

    def __deepcopy__(self, memo: dict[int, Any]) -> "Budget":
        """That of a copied model."""
        return Budget(deepcopy(self.regions, memo), self.needed.__wrapped__)


def tokens_of(tensors: Sequence[Tensor]) -> int:
    """Return the tokens of a batch: elements of its indices, or vectors of its features."""
    indices = [t.numel() for t in tensors if not t.is_floating_point() and t.dtype != torch.bool]
    if indices:
        return max(indices)
    return max((math.prod(t.shape[:-1]) for t in tensors if t.ndim), default=0)
