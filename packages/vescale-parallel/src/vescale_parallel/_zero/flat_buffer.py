"""One flat buffer in memory: this rank's shard, the gathered whole, and the gradients.

The stored parameters are views of the shard, so an optimizer that steps them steps the buffer, and
a gather sends it without a copy. At level 3 the whole exists only between `start` and `release`;
each gather makes a new one, so that nothing that autograd saved of the former is written over. At
levels 1 and 2 it stays, and the shard is a slice of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from vescale_comm import Group, all_gather_into, reduce_scatter_into
from vescale_dtensor import local_leaf, written_unseen

from vescale_parallel._errors import ParallelError
from vescale_parallel._zero.resolve import BufferRow


class FlatBuffer:
    """The memory of one `BufferRow` on this rank.

    Attributes:
        row: what lies where.
        group: the ranks that share it.
        parameters: the stored parameters, one per slot.
        shapes: for each slot the local shape of its gathered values on this rank.
        shard: this rank's elements.
        whole: all ranks' elements, while they are gathered.
        unreduced: gradients that `no_sync` has kept on this rank, as large as the whole.
    """

    def __init__(
        self,
        row: BufferRow,
        group: Group,
        parameters: list[nn.Parameter],
        shapes: list[tuple[int, ...]],
    ) -> None:
        self.row, self.group, self.parameters, self.shapes = row, group, parameters, shapes
        self.ranges = row.plan.ranges(group.rank)
        self.whole: Tensor | None = None
        self.unreduced: Tensor | None = None
        self.arrived: set[int] = set()
        self._pending: Any = None
        self._gathered_at: tuple[int, ...] | None = None
        # At level 1 the memory that gradients are packed into, kept from backward to backward.
        self._packed: Tensor | None = None
        self._allocate()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatBuffer:
        """A buffer of the copied parameters; groups of processes cannot be copied."""
        copied = [deepcopy(one, memo) for one in self.parameters]
        return FlatBuffer(self.row, self.group, copied, self.shapes)

    @property
    def is_kept(self) -> bool:
        """Whether the whole stays between steps."""
        return self.row.zero < 3

    @property
    def locals(self) -> list[Tensor]:
        """The leaves that autograd knows: local tensors of the stored parameters."""
        return [local_leaf(one) for one in self.parameters]

    @property
    def versions(self) -> tuple[int, ...]:
        """Changes whenever a stored parameter is written to."""
        return tuple(one._version for one in self.locals)

    def start(self, *, anew: bool = True) -> None:
        """Start to gather, unless the whole is there or on its way. Collective.

        Args:
            anew: also where the whole is there and old. Not in backward, which needs the values of
                its forward.
        """
        if self._pending is not None:
            return
        if self.whole is not None and not (anew and self._is_old()):
            return
        self._ensure_views()
        # Where a write came from outside of the version counter, it is gathered at each use.
        self._gathered_at = self.versions
        if self.is_kept:
            if self.whole is None:
                self.whole = self._new_whole()
            # Through `.data`, which has a version of its own: the gathered values are those that
            # autograd saved, unless a parameter was written to, which did count.
            target = self.whole.data
        else:
            target = self._new_whole()
        with torch.no_grad():
            # Cast before it is sent: half of the bytes, and the values that casting after has.
            sent = self.shard.detach().to(target.dtype)
            pending = all_gather_into(target, sent, self.group, async_op=True)
        self._pending = (pending, target)

    def _new_whole(self) -> Tensor:
        return self.shard.new_empty(self.row.plan.total, dtype=self.compute)

    @property
    def compute(self) -> torch.dtype:
        """Dtype of the gathered values."""
        # Without a word of the plan they follow the parameters, also after `model.double()`.
        given = self.row.compute != self.row.dtype
        return self.row.compute if given else self.shard.dtype

    @property
    def reduce(self) -> torch.dtype:
        """Dtype in which gradients are summed."""
        return self.row.reduce if self.row.reduce != self.row.compute else self.compute

    def _is_old(self) -> bool:
        # Also at level 3: what a forward without a backward left gathered may be old by now. This
        # goes by what the program did, not by memory: a rank may own nothing of a parameter.
        unseen = any(written_unseen(one) for one in self.parameters)
        return unseen or self._gathered_at != self.versions

    def stepped(self) -> None:
        """An optimizer has stepped the parameters: what is gathered is old."""
        # Also where this rank owns nothing, and the step had nothing to write.
        self._gathered_at = None

    def wait(self, *, anew: bool = True) -> None:
        """Have the whole. Collective, unless it is there; for `anew` see `start`."""
        self.start(anew=anew)
        if self._pending is not None:
            pending, target = self._pending
            self._pending = None
            pending.wait()
            if not self.is_kept:
                self.whole = target

    def release(self) -> None:
        """Give the whole back, at level 3; a gather under way is waited for."""
        if self._pending is not None:
            self.wait(anew=False)
        if not self.is_kept:
            self.whole = None

    def views(self) -> list[Tensor]:
        """The gathered values of each slot, as views of the whole without a history."""
        assert self.whole is not None
        base = self.whole.detach()
        slots = zip(self.row.plan.slots, self.shapes, strict=True)
        return [
            # Shorter than the slot where another axis shards the parameter unevenly.
            base[slot.offset : slot.offset + torch.Size(shape).numel()].view(shape)
            for slot, shape in slots
        ]

    def slot_at(self, offset: int) -> int:
        """The slot in which an element of the whole lies."""
        starts = [slot.offset for slot in self.row.plan.slots]
        return max(bisect_right(starts, offset) - 1, 0)

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Add this rank's contributions to those that are not reduced yet. No communication."""
        with torch.no_grad():
            if self.unreduced is None:
                # Zeroed: slots that got no gradient, and the padding, are sent along.
                self.unreduced = self._pack_memory()
            for index, (slot, gradient) in enumerate(
                zip(self.row.plan.slots, gradients, strict=True)
            ):
                if gradient is not None:
                    into = self.unreduced[slot.offset : slot.offset + gradient.numel()]
                    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                    into.add_(dense.reshape(-1))
                    self.arrived.add(index)

    def _pack_memory(self) -> Tensor:
        if self._packed is not None and self._packed.dtype == self.reduce:
            return self._packed.zero_()
        packed = self.shard.new_zeros(self.row.plan.total, dtype=self.reduce)
        if self.row.zero == 1:
            self._packed = packed
        return packed

    def reduced(self) -> list[Tensor | None]:
        """The totals of the shards of all contributions; None for what got none. Collective."""
        packed, arrived = self.unreduced, self.arrived
        self.unreduced, self.arrived = None, set()
        if packed is None:
            return [None] * len(self.parameters)
        # As gradients of whole parameters are: halves are added in float32, in the order of ranks.
        order = "rank" if packed.dtype.itemsize < 4 else "native"
        with torch.no_grad():
            total = packed.new_empty(self.row.plan.piece)
            reduce_scatter_into(total, packed, self.group, order=order)  # type: ignore[arg-type]
        pieces = self._pieces(total.to(self.shard.dtype))
        return [piece if index in arrived else None for index, piece in enumerate(pieces)]

    def _pieces(self, shard: Tensor) -> list[Tensor]:
        """For each slot what this rank owns of it, as views of a shard-sized tensor."""
        found = []
        start = self.group.rank * self.row.plan.piece
        shapes = zip(self.row.plan.slots, self.ranges, self.shapes, strict=True)
        for slot, (low, high), shape in shapes:
            # A slot that is longer than this rank's values is whole on one rank.
            numel = torch.Size(shape).numel()
            low, high = min(low, numel), min(high, numel)
            # Where nothing is owned, any place does; one inside of the shard has an address.
            at = slot.offset + low - start if high > low else 0
            found.append(shard[at : at + high - low])
        return found

    def _allocate(self) -> None:
        first = local_leaf(self.parameters[0])
        self.whole = None
        if self.is_kept and self.row.compute == self.row.dtype:
            self.whole = first.detach().new_zeros(self.row.plan.total)
            start = self.group.rank * self.row.plan.piece
            self.shard = self.whole[start : start + self.row.plan.piece]
        else:
            self.shard = first.detach().new_zeros(self.row.plan.piece)
        self._gathered_at = None
        self._adopt()

    def _adopt(self) -> None:
        """Move the values of the stored parameters into the shard, and make them views of it."""
        with torch.no_grad():
            pieces = self._pieces(self.shard.detach())
            for local, piece in zip(self.locals, pieces, strict=True):
                piece.copy_(local)
                # The leaf stays the same object, with its gradient, hooks and optimizer state.
                local.data = piece

    def _are_views(self) -> bool:
        pieces = self._pieces(self.shard)
        return all(
            local.data_ptr() == piece.data_ptr() and local.dtype == piece.dtype
            for local, piece in zip(self.locals, pieces, strict=True)
            if piece.numel()
        )

    def _ensure_views(self) -> None:
        """Put the parameters back into the shard, where `.to()` or `.data =` took them out of it.

        Raises:
            ParallelError: they have several dtypes now.
        """
        dtypes = {one.dtype for one in self.parameters}
        if len(dtypes) > 1:
            names = [slot.names[0] for slot in self.row.plan.slots]
            raise ParallelError(
                f"the parameters {names} are gathered in one buffer, and have several dtypes now: "
                f"{sorted(map(str, dtypes))}. Convert all of them, or give them units of their own."
            )
        if dtypes != {self.shard.dtype} or self.locals[0].device != self.shard.device:
            self._allocate()
        elif not self._are_views():
            self._adopt()
