"""Units of ZeRO as what a joint graph gathers: stand-ins while it is made, collectives in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vescale_comm import all_gather, reduce_scatter
from vescale_dtensor import DTensor
from vescale_dtensor.storage import Gathering, StoredSlice, local_leaf, local_leaves

from vescale_parallel._errors import GraphError
from vescale_parallel._zero.flat_buffer import FlatBuffer
from vescale_parallel._zero.gradient_packing import order_of
from vescale_parallel._zero.unit import Unit, put_all


class StoredUnit:
    """A unit of ZeRO, as a `vescale_dtensor.storage.ParameterStorage`.

    Attributes:
        name: of the unit.
        unit: it.
        names, stand_ins, stored, slices: see there; buffer after buffer, and then what
            is on every rank in full.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit, self.name = unit, f"unit {unit.name}"
        self.names = [one.name for one in unit.held]
        self.stored: list[Any] = [one.stored for one in unit.held]
        # How many lie in buffers: they come first, in `held` as in `names`.
        self._placed = sum(len(one.parameters) for one in unit.buffers)
        self.slices = [
            StoredSlice(index, *place)
            for index, buffer in enumerate(unit.buffers)
            for place in buffer.owned
        ]
        rest = range(len(unit.held) - self._placed)
        self.slices += [StoredSlice(len(unit.buffers) + at) for at in rest]
        self._data_uses: list[Any] = []
        self.stand_ins = self._stand_ins()

    def _stand_ins(self) -> list[DTensor]:
        """Leaves with the gathered values, which the recorded calls compute with. Collective."""
        unit = self.unit
        unit.wait()
        with torch.no_grad():
            # Clones: `release` takes back the memory that the gathered values lie in.
            found: list[Any] = [one.clone() for one in unit.wrapped(unit.aliases()[0])]
        unit.release()
        for one, leaf in zip(unit.held, found, strict=True):
            leaf.requires_grad_(one.stored.requires_grad)
            leaf._is_param = True  # `isinstance(weight, nn.Parameter)`, as on one device
        # So that what is written by `.data` in a recording is counted, too.
        Gathering.watch_data(found, self._data_uses)
        return found

    def let_go(self) -> None:
        """Give back the memory of the stand-ins: no graph reads them."""
        for one in self.stand_ins:
            local_leaf(one).untyped_storage().resize_(0)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the modules hold the stand-ins, and the hooks of the unit do nothing."""
        unit, places = self.unit, [one.places for one in self.unit.held]
        unit.require_stored()
        # What is inside of a call of the unit is left alone by its hooks.
        unit.depth += 1
        put_all(places, self.stand_ins)
        before = [one._version for one in local_leaves(self.stand_ins)]
        try:
            yield
            self._require_unwritten(before)
        finally:
            put_all(places, self.stored)
            unit.depth -= 1

    def _require_unwritten(self, versions: Sequence[int]) -> None:
        """Refuse a forward that writes to parameters: nothing would store what a graph writes.

        Raises:
            GraphError: it does.
        """
        pairs = zip(self.names, local_leaves(self.stand_ins), versions, strict=True)
        written = [name for name, leaf, version in pairs if leaf._version != version]
        written += [self.names[0]] * any(given is None for _, given in self._data_uses)
        if written:
            raise GraphError(
                f"train_step: the forward writes to parameters, as '{written[0]}', which zero "
                "gathers: a graph stores none of that. Write to them between steps, or give them "
                "level 0."
            )

    def inputs(self) -> list[Tensor]:
        """The shard of each buffer, and the local tensors of what is on every rank in full.

        Raises:
            GraphError: the unit keeps gradients of a backward in `no_sync`; parameters train that
                did not.
        """
        if any(one.unreduced is not None for one in self.unit.buffers):
            raise GraphError(
                f"'{self.names[0]}' has gradients that no_sync() has kept, to which a graph adds "
                "nothing: step the optimizer, or zero_grad(), first"
            )
        for name, one, other in zip(self.names, self.stored, self.stand_ins, strict=True):
            if one.requires_grad != other.requires_grad:
                raise GraphError(f"requires_grad of '{name}' has changed: make the graph anew")
        # Detached: the graph holds its own backward, and autograd must not record another one.
        kept = self.stored[self._placed :]
        return [one.current_shard()[0] for one in self.unit.buffers] + [
            local_leaf(one).detach() for one in kept
        ]

    def gather(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The gathered values, by one all-gather a buffer."""
        found = []
        for buffer, shard in zip(self.unit.buffers, inputs, strict=False):
            # Cast before it is sent: in half the bytes where the dtype is half as wide.
            full = all_gather(shard.to(buffer.compute), buffer.group)
            # Views of what arrives: parameters are never copied out of it.
            for shape, _, start in buffer.places:
                found.append(full[start : start + torch.Size(shape).numel()].view(shape))
        for one, local in zip(
            self.unit.held[self._placed :], inputs[len(self.unit.buffers) :], strict=True
        ):
            found.append(local if one.compute is None else local.to(one.compute))
        return found

    def reduce(
        self, contributions: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """What this rank stores of the sums, by one reduce-scatter a buffer."""
        totals: list[Tensor | None] = []
        for buffer, shard in zip(self.unit.buffers, inputs, strict=False):
            own = contributions[len(totals) : len(totals) + len(buffer.parameters)]
            totals += _reduced(buffer, own, shard)
        pairs = zip(self.stored[self._placed :], contributions[self._placed :], strict=True)
        return totals + [None if g is None else g.to(one.dtype) for one, g in pairs]

    def written(self) -> None:
        """What is gathered is old."""
        for buffer in self.unit.buffers:
            buffer.stepped()


def _reduced(
    buffer: FlatBuffer, contributions: Sequence[Tensor | None], shard: Tensor
) -> list[Tensor | None]:
    """The same bits as `FlatBuffer.reduced`: zeros where nothing has arrived, and as padding."""
    if all(one is None for one in contributions):
        return [None] * len(contributions)
    pieces, at = [], 0
    for (_, _, start), gradient in zip(buffer.places, contributions, strict=True):
        if gradient is None:
            continue
        # A parameter that no gradient reached adds zeros, as in eager mode: the sum is of one
        # length on all ranks.
        if start > at:
            pieces.append(shard.new_zeros(start - at, dtype=buffer.reduce))
        pieces.append(gradient.to(buffer.reduce).reshape(-1))
        at = start + gradient.numel()
    if buffer.row.plan.total > at:
        pieces.append(shard.new_zeros(buffer.row.plan.total - at, dtype=buffer.reduce))
    packed = torch.cat(pieces)
    order = order_of(packed, buffer.group)
    total = reduce_scatter(packed, buffer.group, order=order).to(shard.dtype)
    shards = buffer.shards_of(total)
    return [
        None if gradient is None else one
        for one, gradient in zip(shards, contributions, strict=True)
    ]
