"""This rank's elements of a flat buffer, and the stored parameters, which are views of them.

What takes parameters out (`.to()`, `p.data = values`) is noticed where the shard is used next. Then
all of them move into new memory: the former is left as it is, since others may have it, as whoever
keeps `saved = p.data` to assign it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from vescale_dtensor.storage import local_leaf, local_leaves, memories_of, separate_memory

from vescale_parallel._errors import ParallelError
from vescale_parallel._zero.flat_plan import owned_places
from vescale_parallel._zero.host import HOST, HostShard
from vescale_parallel._zero.resolve import BufferRow

_data_ptr = Tensor.data_ptr


class StoredShard:
    """The memory of the stored parameters of one buffer on this rank.

    Attributes:
        owned: for each slot, where in the shard this rank's part of it begins and ends.
        values: this rank's elements.
        within: at levels 1 and 2 all ranks' elements, of which these are a slice; else None.
        leaves: the local tensors of the parameters, as of the last look.
        moves: for each slot, how often the parameter was given other memory, by `.data =`.
    """

    def __init__(
        self,
        row: BufferRow,
        rank: int,
        parameters: Sequence[nn.Parameter],
        shapes: Sequence[tuple[int, ...]],
        host: HostShard | None,
    ) -> None:
        self._row, self._rank, self._parameters, self._host = row, rank, parameters, host
        self.owned = owned_places(row.plan, rank, shapes)
        self.moves = [0] * len(parameters)
        self._memories: list[object] = []
        self._allocate()

    def parts_of(self, shard: Tensor) -> list[Tensor]:
        """For each slot what this rank owns of it, as views of a shard-sized tensor."""
        return [shard[at:end] for at, end in self.owned]

    def ensure(self) -> bool:
        """Put the parameters back into one shard, where something took them out of it.

        Returns:
            Whether that is new memory.

        Raises:
            ParallelError: they have several dtypes now, or lie on a device and not on the host.
        """
        # Of all parameters at each gather, so as lists.
        leaves = local_leaves(self._parameters)
        memories = memories_of(self._parameters)
        if memories == self._memories and self._are_views(leaves):
            self.leaves = leaves
            return False
        self._require_movable(leaves)
        # By what the program did, which is equal on all ranks, and not by addresses: a rank may own
        # nothing.
        for slot, (now, then) in enumerate(zip(memories, self._memories, strict=True)):
            self.moves[slot] += now is not then
        self._allocate()
        return True

    def _are_views(self, leaves: Sequence[Tensor]) -> bool:
        # Those that own nothing have no address.
        shard = self.values
        if shard.data_ptr() != self._address or leaves[0].device != shard.device:
            return False
        return (
            list(map(_data_ptr, leaves)) == self._addresses
            and [one.dtype for one in leaves] == self._dtypes
        )

    def _require_movable(self, leaves: Sequence[Tensor]) -> None:
        dtypes = {one.dtype for one in leaves}
        if len(dtypes) > 1:
            names = [slot.names[0] for slot in self._row.plan.slots]
            raise ParallelError(
                f"the parameters {names} are gathered in one buffer, and have several dtypes now: "
                f"{sorted(map(str, dtypes))}. Convert all of them, or give them units of their own."
            )
        if self._host is not None and any(one.device != HOST for one in leaves):
            raise ParallelError(
                f"parameters as '{self._row.plan.slots[0].names[0]}' lie on the host by offload=, "
                f"and were moved to {leaves[0].device} since: leave out model.to(...) after "
                "parallelize. Each gather brings them to the device."
            )

    def _allocate(self) -> None:
        """Move the values of the parameters into new memory, and make them views of it."""
        # Also at the first forward after `model.double()`, which may be one in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.values, self.within = self._new_memory()
            leaves = local_leaves(self._parameters)
            parts = self.parts_of(self.values.detach())
            for local, part in zip(leaves, parts, strict=True):
                part.copy_(local)
                # The leaf stays the same object, with its gradient, hooks and optimizer state.
                local.data = part
        separate_memory(self._parameters)
        self.leaves, self._memories = leaves, memories_of(self._parameters)
        self._address = self.values.data_ptr()
        self._addresses = [one.data_ptr() for one in leaves]
        self._dtypes = [self.values.dtype] * len(leaves)

    def _new_memory(self) -> tuple[Tensor, Tensor | None]:
        row, first = self._row, local_leaf(self._parameters[0])
        size = row.plan.sizes[self._rank]
        if self._host is not None:
            self._host.forget()
            return self._host.link.zeros(size, first.dtype), None
        if row.zero == 3 or row.compute != row.dtype:
            return first.detach().new_zeros(size), None
        full = first.detach().new_zeros(row.plan.total)
        start = row.plan.start(self._rank)
        return full[start : start + size], full
