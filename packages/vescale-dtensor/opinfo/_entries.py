"""The entries of torch's operator database, and a few diverse samples of each.

The one file that touches `torch.testing._internal`: the database is torch's own list of how every
operator may be called. Its modules import `expecttest` for a base class of test cases and nothing
that is used here, so where that is not installed unittest's own class takes its place.
"""

from __future__ import annotations

import random
import sys
import types
import unittest
import warnings
import zlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

MOST_DRAWN = 400
LARGEST = 20_000  # elements of all tensors of a sample

# What an entry that has no float32 form is called with, the first that it supports.
_OTHER_DTYPES = (
    torch.int64,
    torch.int32,
    torch.complex64,
    torch.bool,
    torch.float64,
    torch.float8_e4m3fn,
)


@dataclass(frozen=True)
class Sample:
    """One way to call an entry: `call(input, *args, **kwargs)`."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    broadcasts_input: bool

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        leaves = tree_leaves((self.input, self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@cache
def entries() -> dict[str, Any]:
    """Every entry by its full name, in the order of the names."""
    if find_spec("expecttest") is None:
        base = types.ModuleType("expecttest")
        base.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = base
    with warnings.catch_warnings(action="ignore"):
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.full_name: op for op in sorted(op_db, key=lambda op: op.full_name)}


def dtype_of(entry: Any) -> torch.dtype | None:
    """What to call it with on a CPU: float32 where it can be; None where it cannot be called."""
    supported = entry.supported_dtypes("cpu")
    return next((d for d in (torch.float32, *_OTHER_DTYPES) if d in supported), None)


def samples(name: str, most: int, seed: int) -> list[Sample]:
    """Up to `most` samples of an entry that differ in form; the same for the same seed."""
    entry, key = entries()[name], zlib.crc32(f"{name} {seed}".encode())
    dtype = dtype_of(entry)
    assert dtype is not None
    grad = entry.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(key)
    random.seed(key)
    with warnings.catch_warnings(action="ignore"):
        drawn = entry.sample_inputs("cpu", dtype, requires_grad=grad)
        found = [
            Sample(s.input, tuple(s.args), dict(s.kwargs), s.broadcasts_input)
            for s in islice(drawn, MOST_DRAWN)
        ]
    small = [s for s in found if sum(t.numel() for t in s.tensors()) <= LARGEST]
    small = small or sorted(found, key=lambda s: sum(t.numel() for t in s.tensors()))[:1]
    random.Random(key).shuffle(small)
    return list(islice(_diverse(small), most))


def _diverse(found: list[Sample]) -> Iterator[Sample]:
    """One of each form first, those that have elements before all others; then the rest."""
    found = sorted(found, key=lambda s: any(t.numel() == 0 for t in s.tensors()))
    seen: set[Hashable] = set()
    later = []
    for sample in found:
        form = _form((sample.input, sample.args, sample.kwargs))
        if form in seen:
            later.append(sample)
        else:
            seen.add(form)
            yield sample
    yield from later


def _form(value: Any) -> Hashable:
    """What two samples of the same kind have in common: no sizes and no numbers."""
    if isinstance(value, Tensor):
        return (value.ndim, value.dtype, value.numel() == 0)
    if isinstance(value, list | tuple):
        return (type(value).__name__, *{_form(item): None for item in value})
    if isinstance(value, dict):
        return tuple((name, _form(item)) for name, item in value.items())
    return value if isinstance(value, bool | str) else type(value).__name__
