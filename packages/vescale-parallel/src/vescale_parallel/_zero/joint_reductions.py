"""Gradients of small units are reduced together, as `joint_gathers` gathers their values, and why.

What backward has packed of a unit waits for what it packs next, as long as all of it is no more
than `TOGETHER_BYTES` and nobody asks for a total. Then one collective sends it, with what each rank
keeps of one unit beside what it keeps of the others: the same sums, element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from vescale_comm import Group, reduce_scatter

from vescale_parallel._zero import joint_gathers
from vescale_parallel._zero.gradient_packing import order_of
from vescale_parallel._zero.no_history import unrecorded


class Waits(Protocol):
    """What is under way."""

    def wait(self) -> Tensor:
        """Return this rank's totals."""


class SummedUnit(Protocol):
    """What matters of a unit."""

    @property
    def packed_bytes(self) -> int: ...
    @property
    def trains(self) -> bool: ...


class SumsTogether:
    """The reductions of a model that wait to be sent together.

    Args:
        order: the units in the order of the last forward, the root first.
    """

    def __init__(self, order: Callable[[], Sequence[SummedUnit]]) -> None:
        self._order = order
        self._waiting: dict[Any, _Sum] = {}

    def add(self, packed: Tensor, group: Group) -> Waits:
        """Reduce packed gradients, as long for each rank, with others. Collective, at some time.

        All ranks of the group pack alike and ask for totals alike, so they send alike.
        """
        # By the group itself: it lives as long as what waits.
        kind = (group, packed.dtype, packed.device)
        known = self._waiting.get(kind)
        # One that somebody has asked for is on its way.
        if known is None or known.is_sent or not known.fits(packed):
            if known is not None:
                known.start()
            known = self._waiting[kind] = _Sum(group)
        return known.add(packed)

    def added(self, unit: SummedUnit) -> None:
        """All of a unit was added: send what will not wait for the next one. Collective then."""
        order = self._order()
        # Backward goes the other way. Of a unit that it does not know it cannot tell.
        at = order.index(unit) - 1 if unit in order else -1
        if at < 0 or not self._waits_for(order[at]):
            self.send()

    def with_root(self) -> bool:
        """Whether the root's gradients, which come last, fit beside those that come before."""
        order = self._order()
        sizes = [one.packed_bytes for one in order[:2]]
        return len(sizes) > 1 and sum(sizes) <= joint_gathers.TOGETHER_BYTES

    def _waits_for(self, unit: SummedUnit) -> bool:
        waiting = sum(one.nbytes for one in self._waiting.values() if not one.is_sent)
        return unit.trains and waiting + unit.packed_bytes <= joint_gathers.TOGETHER_BYTES

    def send(self) -> None:
        """Send all that waits. Collective, if something does."""
        for one in self._waiting.values():
            one.start()
        self._waiting = {}  # now: what could not be sent is to be forgotten

    def forget(self) -> None:
        """What waits is of a backward that raised: nobody is to send it."""
        for one in self._waiting.values():
            one.forget()
        self._waiting = {}


class _Sum:
    """A reduction of several buffers, not yet sent, under way or over."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._packed: list[Tensor] = []
        self._sizes: list[int] = []
        self._pending: Any = None
        self._totals: dict[int, Tensor] = {}
        self.nbytes = 0
        self.is_sent = False

    def fits(self, packed: Tensor) -> bool:
        """Whether it may take these gradients along."""
        return self.nbytes + packed.nbytes <= joint_gathers.TOGETHER_BYTES

    def add(self, packed: Tensor) -> _Part:
        """Take gradients along."""
        self._packed.append(packed)
        self._sizes.append(packed.numel() // self._group.size)
        self.nbytes += packed.nbytes
        return _Part(self, len(self._sizes) - 1)

    def start(self) -> None:
        """Send it, if nobody has."""
        if self.is_sent:
            return
        self.is_sent, group = True, self._group
        with unrecorded():
            flat = self._flat()  # alone from here on: the exchange takes as much again
            order = order_of(flat, group)
            self._pending = reduce_scatter(flat, group, async_op=True, order=order)

    def _flat(self) -> Tensor:
        """What is sent; the parts of it are let go."""
        packed, self._packed = self._packed, []
        if len(packed) == 1:
            return packed[0]  # without a copy
        # A row for each rank, of what it keeps of each buffer.
        return torch.cat([one.view(self._group.size, -1) for one in packed], dim=1).view(-1)

    def forget(self) -> None:
        """Never send it."""
        self._packed, self.is_sent = [], True
        # Who drops what was started waits for it, sent or not.
        self._totals = dict.fromkeys(range(len(self._sizes)), torch.empty(0, device="cpu"))

    def total(self, number: int) -> Tensor:
        """This rank's totals of one of the buffers; asked for once."""
        self.start()
        if self._pending is not None:
            with unrecorded():
                # No views of one another for autograd: no two share an element.
                found = torch.unsafe_split_with_sizes(self._pending.wait(), self._sizes)
            self._pending = None  # now: where waiting raises, it does for each of them
            self._totals = dict(enumerate(found))
        return self._totals.pop(number)


class _Part:
    """What one buffer waits for."""

    def __init__(self, of: _Sum, number: int) -> None:
        self._of, self._number = of, number

    def wait(self) -> Tensor:
        """Return this rank's totals."""
        return self._of.total(self._number)
