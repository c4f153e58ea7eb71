"""Finds tensors in nested arguments and results."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, dicts and slices, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_within(item)
    elif isinstance(value, dict):
        yield from tensors_within(list(value.values()))
    elif isinstance(value, slice):  # x[i:j], where i and j may be tensors of no dims
        yield from tensors_within((value.start, value.stop, value.step))
