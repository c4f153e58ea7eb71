"""Sums over a batch that are no loss: counts of right answers, histograms, squared errors."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vescale_dtensor import DTensor

from vescale_parallel._errors import ParallelError

Value = Tensor | float | int


def values_within(found: Any) -> list[Value]:
    """Return the numbers and tensors of a nesting of dicts, lists and tuples, in their order.

    Raises:
        ParallelError: there is something else in it, which cannot be added up.
    """
    if isinstance(found, Tensor | float | int):
        return [found]
    if isinstance(found, Mapping):
        return [value for one in found.values() for value in values_within(one)]
    if isinstance(found, list | tuple):
        return [value for one in found for value in values_within(one)]
    raise ParallelError(
        f"sum_over_shards: the function returned a {type(found).__name__}. Return tensors and "
        "numbers, in dicts, lists and tuples: they are added up over the rows."
    )


def with_values(like: Any, values: Any) -> Any:
    """Return the same nesting with other numbers and tensors, taken from an iterator."""
    if isinstance(like, Tensor | float | int):
        return next(values)
    if isinstance(like, Mapping):
        return {key: with_values(one, values) for key, one in like.items()}
    items = [with_values(one, values) for one in like]
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


@dataclass(frozen=True)
class PackedResult:
    """What a function returned for one shard, in two rows: integers, and floats as float64."""

    integers: Tensor
    floats: Tensor

    @classmethod
    def of(cls, values: Sequence[Value], device: str) -> PackedResult:
        """Pack them, in dtypes whose sums lose next to nothing of what narrower ones hold."""
        rows: dict[bool, list[Tensor]] = {True: [], False: []}
        for one in values:
            tensor = (
                _plain(one).detach() if isinstance(one, Tensor) else torch.tensor(one, device="cpu")
            )
            if tensor.is_complex():
                raise ParallelError("sum_over_shards: complex numbers are not added up.")
            rows[tensor.is_floating_point()].append(tensor.to(device).reshape(-1))
        return cls(_row(rows[False], torch.int64, device), _row(rows[True], torch.float64, device))

    def __add__(self, other: PackedResult) -> PackedResult:
        return PackedResult(self.integers + other.integers, self.floats + other.floats)

    def unpacked(self, like: Sequence[Value]) -> list[Value]:
        """Return the sums, in the form of what one shard returned."""
        at = {True: 0, False: 0}
        found: list[Value] = []
        for one in like:
            tensor = one if isinstance(one, Tensor) else torch.tensor(one, device="cpu")
            floats = tensor.is_floating_point()
            row = self.floats if floats else self.integers
            part = row[at[floats] : at[floats] + tensor.numel()].view(tensor.shape)
            at[floats] += tensor.numel()
            if not isinstance(one, Tensor):
                found.append(part.item())
            elif floats:
                # Halves in float32, as gradients are.
                found.append(part.to(one.dtype if one.dtype.itemsize >= 4 else torch.float32))
            else:
                found.append(part.clone())
        return found


def form_of(values: Sequence[Value]) -> int:
    """Return a digest of shapes and kinds: the same for all shards."""
    said = [
        (tuple(one.shape), str(one.dtype)) if isinstance(one, Tensor) else type(one).__name__
        for one in values
    ]
    return zlib.crc32(repr(said).encode())


def _plain(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def _row(parts: Sequence[Tensor], dtype: torch.dtype, device: str) -> Tensor:
    if not parts:
        return torch.zeros(0, dtype=dtype, device=device)
    return torch.cat([one.to(dtype) for one in parts])
