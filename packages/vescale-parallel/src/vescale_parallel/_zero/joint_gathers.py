"""Small units are gathered together: of a collective that small, what it sends costs nothing.

What counts is how often the ranks of a group have to wake each other. Shards of several buffers are
sent as one, and what arrives, one rank's shards after the other's, is copied apart where the first
of the buffers is waited for. Large units are gathered one by one, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from vescale_comm import all_gather_into_tensor

from vescale_parallel._zero.flat_buffer import FlatBuffer
from vescale_parallel._zero.unit import Unit

TOGETHER_BYTES: Final = 1 << 20
"""Gathered values that are sent for together are no more than that: no memory that matters.

Up to there a message more costs more than what it carries, on one machine and between several.
"""


def start_together(units: Sequence[Unit]) -> None:
    """Start to gather the first of these units, and with it those that are small as well.

    Nothing is done where the first one goes by itself. Collective.

    Args:
        units: in the order in which they come next in forward. At its beginning there are the
            fewest activations; in backward, more that is gathered would be memory at a peak.
    """
    kinds: dict[Any, list[FlatBuffer]] = {}
    for one in [buffer for unit in _fitting(units) for buffer in unit.buffers]:
        if one.pending is None and one.full is None:
            kind = (one.group, one.compute, one.shard.device)
            kinds.setdefault(kind, []).append(one)
    for buffers in kinds.values():
        _start(buffers)


def _fitting(units: Sequence[Unit]) -> Sequence[Unit]:
    total = 0
    for number, unit in enumerate(units):
        total += unit.full_bytes
        if total > TOGETHER_BYTES or not all([one.joins for one in unit.buffers]):
            return units[:number]
    return units


def _start(buffers: Sequence[FlatBuffer]) -> None:
    if len(buffers) == 1:
        buffers[0].start()  # without a copy
        return
    # Ranks that are told of another order raise here, before anything is sent.
    sent = [buffer.begin() for buffer in buffers]
    flat, group = torch.cat(sent), buffers[0].group
    out = flat.new_empty(group.size * flat.numel())
    pending = all_gather_into_tensor(out, flat, group, async_op=True)
    together = _JointGather(pending, out, [one.numel() for one in sent])
    for number, buffer in enumerate(buffers):
        buffer.pending = (_Part(together, number), None)


class _JointGather:
    """A gather of several buffers, under way or over."""

    def __init__(self, pending: Any, out: Tensor, sizes: Sequence[int]) -> None:
        self._pending, self._out, self._sizes = pending, out, sizes
        self._parts: dict[int, Tensor] = {}

    def part(self, number: int) -> Tensor:
        """The gathered values of one of the buffers; asked for once."""
        if self._pending is not None:
            self._pending.wait()  # where that raises, it does for each of them
            self._pending = None
            self._parts = dict(enumerate(self._apart()))
        return self._parts.pop(number)  # which is freed when its buffer gives it back

    def _apart(self) -> Iterator[Tensor]:
        out = self._out
        del self._out
        # Tensors of inference mode, in which a forward may run by now, count no writes.
        with torch.inference_mode(False), torch.no_grad():
            rows = out.view(-1, sum(self._sizes))
            for own in rows.split_with_sizes(self._sizes, dim=1):
                # Of one rank, too: what is a view of others' memory has another offset.
                yield own.clone(memory_format=torch.contiguous_format).view(-1)


class _Part:
    """What one buffer waits for."""

    def __init__(self, together: _JointGather, number: int) -> None:
        self._together, self._number = together, number

    def wait(self) -> Tensor:
        """Return the gathered values."""
        return self._together.part(self._number)
