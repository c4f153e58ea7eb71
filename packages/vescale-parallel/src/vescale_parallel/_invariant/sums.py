"""`sum_over_shards`: metrics of a batch, with the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vescale_parallel._invariant.step import InvariantStep
from vescale_parallel._step.forward_backward import step_of
from vescale_parallel._step.parts import Part


@torch.no_grad()
def sum_over_shards(
    model: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return what a function gives for the rows of each logical shard, added up. Collective.

    With `deterministic="dp-invariant"` each rank calls it for its logical shards, and the results
    are added in the order of the tree: the same bits on any number of data-parallel ranks. Of any
    other model it is called once, with the whole batch. Nothing is recorded for autograd, and the
    random generators end where they were.

    Args:
        model: what `parallelize` returned; the function calls it, or not.
        function: of the rows of the arguments; returns tensors and numbers, in dicts, lists and
            tuples, alike for all shards: sums over rows, not means.
        *args: the whole batch, on every rank.
        **kwargs: the whole batch, on every rank.

    Returns:
        The same nesting, of sums. Integers are added as int64, and floats as float64; tensors of
        half precision come back as float32.

    Raises:
        ParallelError: arguments have different numbers of rows, or there is something in the
            result that cannot be added up.

    Example:
        right, rows = sum_over_shards(
            model, lambda x, y: ((model(x).argmax(-1) == y).sum(), len(y)), images, labels
        )
    """
    step = step_of(model)
    if not isinstance(step, InvariantStep):
        return function(*args, **kwargs)
    return step.sums(function, Part(args, kwargs, None))
