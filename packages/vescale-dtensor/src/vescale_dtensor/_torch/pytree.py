"""Finds tensors in nested arguments and results."""

from typing import Any

from torch import Tensor


def tensors_within(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples, dicts and slices, in order."""
    # A loop and not a recursion: recordings look into the arguments of every call.
    found: list[Tensor] = []
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            left.extend(reversed(one))
        elif isinstance(one, dict):
            left.extend(reversed(one.values()))
        elif isinstance(one, slice):  # x[i:j], where i and j may be tensors of no dims
            left.extend((one.step, one.stop, one.start))
    return found
