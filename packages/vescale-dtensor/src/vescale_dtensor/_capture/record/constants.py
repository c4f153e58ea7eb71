"""Tensors whose values follow from Python constants alone: recording may read those.

`torch.arange(4)` has the same values at every replay, and so has what torch functions compute from
it: a model that asks whether positions are consecutive gets the same answer each time. Tensors from
outside, random numbers, results of other ranks, uninitialised memory, and whatever those were
written into are not constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from vescale_dtensor._torch.compat import storage_identity

_MARK = "constant"
_NAMES = "item tolist __bool__ __float__ __int__ __index__ __complex__ __contains__ __format__"

READABLE = frozenset([*_NAMES.split(), "equal", "allclose", "is_nonzero"])
"""Functions that give Python values, and no memory."""


class Constants:
    """Which of the tensors of a recording are constants."""

    def __init__(self, node_of: Callable[[Tensor], fx.Node | None]) -> None:
        self._node_of = node_of
        # Storages, not tensors: a write through a view changes the base.
        self._written: set[int] = set()

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all of these are constants; of none, they are."""
        # A call without tensors has constant results, such as `torch.arange(4)`.
        return all(map(self._is_constant, tensors))

    def _is_constant(self, tensor: Tensor) -> bool:
        node = self._node_of(tensor)
        if node is None or not node.meta.get(_MARK):
            return False
        return storage_identity(tensor) not in self._written

    def note(self, node: fx.Node, func: Any, written: Iterable[Tensor], constant: bool) -> None:
        """Remember whether a step gives constants; what it wrote to is none, if it is none."""
        # Collectives and fills give what other ranks and generators decide.
        ours = str(getattr(func, "__module__", "")).startswith("vescale")
        # Its values are whatever was in memory, which no two replays share.
        name = str(getattr(func, "__name__", ""))
        unfilled = "empty" in name or name == "from_file"
        if constant and not ours and not unfilled:
            node.meta[_MARK] = True
        else:
            self._written.update(storage_identity(tensor) for tensor in written)

    def forget(self, made: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """Take new memory for what it is: the allocator hands out again what was freed.

        Where ranks differed in that, one would refuse to read a constant and the others not.
        """
        # Views and in-place results have the memory of an operand, which stays as it was noted.
        self._written -= set(map(_memory, made)) - set(map(_memory, given))

    def pass_on(self, node: fx.Node, part: fx.Node) -> None:
        """What is true of a result is true of its parts."""
        part.meta[_MARK] = node.meta.get(_MARK)


def _memory(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return storage_identity(tensor) if tensor.layout is torch.strided else id(tensor)


def is_readable(name: str) -> bool:
    """Whether a function gives Python the value of a constant."""
    return name in READABLE
