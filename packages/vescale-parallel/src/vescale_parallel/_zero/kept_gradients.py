"""Shows in `.grad` of a parameter the gradients that `no_sync` keeps in a buffer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Keeps(Protocol):
    """A buffer that keeps gradients."""

    def add_kept(self, slot: int, shard: Tensor) -> None:
        """Add to what is kept of the parameter in a slot."""

    def drop_slot(self, slot: int) -> None:
        """Forget what is kept of it."""


class KeptGradient:
    """What a buffer keeps of the gradient of one parameter, for `.grad` to find it."""

    def __init__(self, buffer: Keeps, slot: int) -> None:
        self._buffer, self._slot = buffer, slot

    def add(self, shard: Tensor) -> None:
        """Add what this rank's local `.grad` held."""
        self._buffer.add_kept(self._slot, shard)

    def drop(self) -> None:
        """Forget what is kept: `.grad` was set."""
        self._buffer.drop_slot(self._slot)
