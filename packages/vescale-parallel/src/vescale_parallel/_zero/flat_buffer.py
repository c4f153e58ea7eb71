"""One flat buffer in memory: this rank's shard, all gathered values, and the gradients.

The stored parameters are views of the shard, so an optimizer that steps them steps the buffer, and
a gather sends it without a copy. At level 3 `full` exists only between `start` and `release`;
each gather makes a new one, so that nothing that autograd saved of the former is written over. At
levels 1 and 2 it stays, and the shard is a slice of it. With `offload` the shard lies on the host,
and the rest on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from vescale_comm import Group, all_gather_into_tensor, reduce_scatter
from vescale_dtensor.storage import (
    keep_gradient,
    local_leaf,
    local_leaves,
    release_kept_gradient,
    written_unseen,
)

from vescale_parallel._common.gradient_dtypes import dtype_of_sums
from vescale_parallel._zero.flat_plan import Place, pieces_of, place_of
from vescale_parallel._zero.gather_log import GatherLog
from vescale_parallel._zero.gradient_packing import order_of, packed_pieces
from vescale_parallel._zero.host import HostShard
from vescale_parallel._zero.kept_gradients import KeptGradient
from vescale_parallel._zero.no_history import unrecorded
from vescale_parallel._zero.resolve import BufferRow, events_of
from vescale_parallel._zero.stored_shard import StoredShard

_wants = attrgetter("requires_grad")

_HANDED_OUT: Final = (
    " (at each use, since p.to_local() or p.data was taken; on one rank alone take p.detach())"
)

Reduction = tuple[Any, set[int], Tensor | None]
"""One that is under way: its handle, whose gradients are in it, and memory to use again."""


class FlatBuffer:
    """The memory of one `BufferRow` on this rank.

    Attributes:
        row: what is where.
        group: the ranks that share it.
        parameters: the stored parameters, one per slot.
        shapes: for each slot the local shape of its gathered values on this rank.
        log: of gathers and reductions.
        is_kept: whether `full` stays between steps.
        host: how the shard is reached where it lies on the host; None: it lies on the device.
        full: all ranks' elements, while they are gathered.
        leaves: the local tensors of the parameters, as of the last gather.
        moves: for each slot, how often `.data =` has given the parameter other memory.
        handed: the views of `full` that modules compute with, one per slot.
        counted: for each of them, the version up to which writes are in the shard; see
            `parameter_writes`.
        unreduced: gradients that are packed on this rank and not reduced, as large as `full`.
        reduced_next: whether the backward that packed them reduces them; else `no_sync` keeps them.
        sends: sends packed gradients to a group with others'; None: they go by themselves.
    """

    def __init__(
        self,
        row: BufferRow,
        group: Group,
        parameters: list[nn.Parameter],
        shapes: list[tuple[int, ...]],
        log: GatherLog,
        host: HostShard | None = None,
    ) -> None:
        self.log, self.host = log, host
        self.sends: Callable[[Tensor, Group], Any] | None = None
        self.is_kept, self.reduced_next = row.zero < 3, False
        self.row, self.group, self.parameters, self.shapes = row, group, parameters, shapes
        self.full: Tensor | None = None
        self.handed: list[Tensor] = []
        self.counted: list[int] = []
        self.unreduced: Tensor | None = None
        # A parameter without a gradient here may have one elsewhere: all of the buffer is sent.
        self.arrived: set[int] = set()
        self._told_kept: set[int] = set()
        self.pending: Any = None
        self._under_way: list[Any] = []
        self._gathered_at: tuple[int, ...] | None = None
        self._alone = False
        # At level 1 the memory that gradients are packed into, kept from backward to backward.
        self._packed: Tensor | None = None
        self._slots = list(map(place_of, row.plan.slots, shapes))
        # Of the slots, ascending, for whoever looks for the one in which an element of `full` is.
        self.starts = [slot.offset for slot in row.plan.slots]
        self._ends = [at + math.prod(shape) for at, shape in zip(self.starts, shapes, strict=True)]
        self._stored = StoredShard(row, group.rank, parameters, shapes, host)
        self.leaves, self.moves = self._stored.leaves, self._stored.moves
        self._pieces = pieces_of(self.owned, row.plan.sizes[group.rank])
        self._sizes = None if row.plan.is_even else row.plan.sizes
        self._events = events_of(row)
        self._begin_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatBuffer:
        """A buffer of the copied parameters; groups of processes cannot be copied."""
        # Leaves of their own, with values of their own: these are moved into the new shard.
        copied = [deepcopy(one, memo) for one in self.parameters]
        host = None if self.host is None else HostShard(self.host.link, keeps=self.host.keeps)
        return FlatBuffer(self.row, self.group, copied, self.shapes, self.log, host)

    @property
    def device(self) -> torch.device:
        """Where gathered values and packed gradients are."""
        return self.shard.device if self.host is None else self.host.link.device

    @property
    def locals(self) -> list[Tensor]:
        """The leaves that autograd knows: local tensors of the stored parameters."""
        return local_leaves(self.parameters)

    @property
    def versions(self) -> tuple[int, ...]:
        """Changes whenever a stored parameter is written to."""
        return tuple([one._version for one in local_leaves(self.parameters)])

    @property
    def places(self) -> Sequence[Place]:
        """For each slot, where its gathered values are in `full`."""
        return self._slots

    @property
    def owned(self) -> Sequence[tuple[int, int]]:
        """For each slot, where in the shard this rank's part of it begins and ends."""
        return self._stored.owned

    @property
    def shard(self) -> Tensor:
        """This rank's elements."""
        return self._stored.values

    def current_shard(self) -> tuple[Tensor, list[Tensor]]:
        """This rank's elements, without a history, and the leaves, which are views of it."""
        # They may have been moved by `.to()`: a shard that none lies in would be gathered.
        self._ensure()
        return self.shard.detach(), self.leaves

    def start(self, *, anew: bool = True) -> None:
        """Start to gather, unless `full` is there or on its way. Collective.

        Args:
            anew: also where `full` is there and old. Not in backward, which needs the values of
                its forward.
        """
        if self.pending is not None:
            return
        if self.full is not None and not (anew and self._is_old()):
            return
        # Of what lies on the host only, whose copies on the device may be used again.
        is_old = self.host is not None and self._is_old()
        sent = self.begin()
        if self.is_kept and self.full is not None:
            # Through `.data`, which has a version of its own: the values are those that autograd
            # saved, unless a parameter was written to, which did count.
            target = self.full.data
        elif self._stored.within is not None:
            target = self._stored.within
        else:
            # A new one each time: earlier forwards' backwards may still hold views of the former.
            target = self._new_full()
        self.pending = (self._gather(sent, target, is_old=is_old), target)

    def _gather(self, sent: Tensor, target: Tensor, *, is_old: bool) -> Any:
        # In any grad mode: neither the shard nor what it is gathered into has a history.
        group, sizes = self.group, self._sizes
        if self.host is None:
            return all_gather_into_tensor(target, sent, group, sizes=sizes, async_op=True)
        start = self.row.plan.start(group.rank)
        return self.host.gather(sent, target, group, start, sizes, is_old=is_old)

    def gather_again(self, full: Tensor, handed: list[Tensor]) -> None:
        """Have new values where modules compute with the old ones, amid a forward. Collective.

        Args:
            full: what they compute with, which `full` is no more where the shard has moved since.
            handed: views of it that they hold.
        """
        # Into the same memory, which whoever has taken a parameter out of its module has, too.
        self._gather(self.begin(), full.data, is_old=True).wait()
        self.full = full  # also where the shard is other memory by now
        # What is computed from the old ones counts as outdated, and nothing as written by modules.
        increment_version(handed)
        self.handed, self.counted = handed, [one._version for one in handed]

    @property
    def joins(self) -> bool:
        """Whether it may be gathered with others, into memory that is copied from."""
        # What is kept has the shard inside: copied late, it would undo what was written meanwhile.
        own = not self.is_kept and self.host is None and self._sizes is None
        return own and not self._alone

    def begin(self) -> Tensor:
        """Tell the ranks that a gather begins, and return what this one sends."""
        # Ranks that differ in that gather at other times: who is told of it is told why.
        why = _HANDED_OUT if self.is_written_unseen else ""
        self.log.record(self._events["gathers"] + why)
        # First of all: what is sent is the shard, and not the parameters.
        self._ensure()
        # Where a write came from outside of the version counter, it is gathered at each use.
        self._gathered_at = tuple([one._version for one in self.leaves])
        sent, dtype = self.shard, self.compute
        # Cast before it is sent: half of the bytes, and the values that casting after has.
        return sent if self.host is not None or sent.dtype is dtype else sent.to(dtype)

    def _new_full(self) -> Tensor:
        shard, total, dtype = self.shard, self.row.plan.total, self.compute
        device = shard.device if self.host is None else self.device
        if not torch.is_inference_mode_enabled():
            return shard.new_empty(total, dtype=dtype, device=device)
        # Tensors of inference mode count no writes of modules; and what is kept outlives it.
        with torch.inference_mode(False):
            return shard.new_empty(total, dtype=dtype, device=device)

    @property
    def compute(self) -> torch.dtype:
        """Dtype of the gathered values."""
        # Without a word of the plan they follow the parameters, also after `model.double()`.
        given = self.row.compute != self.row.dtype
        return self.row.compute if given else self.shard.dtype

    @property
    def reduce(self) -> torch.dtype:
        """Dtype in which gradients are summed."""
        if self.row.reduce != self.row.compute:
            return self.row.reduce
        return dtype_of_sums(local_leaves(self.parameters), self.compute)

    def _is_old(self) -> bool:
        # Also at level 3: a forward without a backward may have left it. This goes by what the
        # program did, not by memory: a rank may own nothing of a parameter.
        if self._gathered_at != self.versions:
            return True
        return self.is_written_unseen

    @property
    def is_written_unseen(self) -> bool:
        """Whether writes may go unseen: then what is sent right before it is used is right."""
        return True in map(written_unseen, self.parameters)

    def stepped(self) -> None:
        """An optimizer has stepped the parameters: what is gathered is old."""
        # Also where this rank owns nothing, and the step had nothing to write.
        self._gathered_at = None

    def wait(self, *, anew: bool = True) -> None:
        """Have `full`. Collective, unless it is there; for `anew` see `start`."""
        if self.pending is None:
            self.start(anew=anew)
        elif anew and self._is_stale():
            self._finish()
            self.start()
        self._finish()

    def _is_stale(self) -> bool:
        """Whether what was sent ahead was written to since."""
        self._alone = self.is_written_unseen
        return self._is_old()

    def _finish(self) -> None:
        if self.pending is not None:
            (pending, target), self.pending = self.pending, None
            found = pending.wait()
            if not self.is_kept or self.full is None:
                self.full = found if target is None else target

    def release(self) -> None:
        """Give `full` back, at level 3; a gather under way is waited for."""
        if self.pending is not None:
            self.wait(anew=False)
        if not self.is_kept:
            self.full, self.handed = None, []

    def views(self) -> list[Tensor]:
        """Return the gathered values of each slot, as views of `full` without a history."""
        assert self.full is not None
        # Autograd knows these by the node of the unit, which gets all their gradients at once.
        base = self.full.detach()
        # With version counters of their own, by `.data`: views of one buffer share one, which would
        # not tell to which slot a module has written.
        self.handed = [base.as_strided(*place).data for place in self._slots]
        self.counted = [0] * len(self.handed)
        return self.handed

    def add_gradients(self, gradients: Sequence[Tensor | None], *, reduced_next: bool) -> None:
        """Add this rank's contributions to those that are not reduced yet. No communication."""
        if self.unreduced is None:
            # By the first that arrives: all contributions of one backward go the same way.
            self.reduced_next = reduced_next
        # Copied, and not kept: gradients of full parameters together are as large as the buffer.
        self._pack(gradients)
        if not self.reduced_next:
            self._tell_kept()

    def _pack(self, gradients: Sequence[Tensor | None]) -> None:
        with unrecorded():
            if self.unreduced is None and self._pack_at_once(gradients):
                return
            if self.unreduced is None:
                # Zeroed: slots that got no gradient, and the padding, are sent along.
                self.unreduced = self._pack_memory()
            for index, (slot, gradient) in enumerate(
                zip(self.row.plan.slots, gradients, strict=True)
            ):
                if gradient is not None:
                    into = self.unreduced[slot.offset : slot.offset + gradient.numel()]
                    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                    # What is there of a slot that did not arrive was dropped, or is zero.
                    write = into.add_ if index in self.arrived else into.copy_
                    write(dense.reshape(-1))
                    self.arrived.add(index)

    def _pack_at_once(self, gradients: Sequence[Tensor | None]) -> bool:
        """Pack gradients of all parameters, if they are there, dense and in the dtype of sums."""
        pieces = packed_pieces(self.starts, self._ends, gradients, self.reduce, self.row.plan.total)
        if pieces is None:
            return False
        if self._packed is not None and self._packed.dtype == self.reduce:
            # Into memory that the step before has left: at level 1 nothing else holds it.
            self.unreduced = torch.cat(pieces, out=self._packed)
        else:
            self.unreduced = torch.cat(pieces)
            if self.row.zero == 1:
                self._packed = self.unreduced
        self.arrived.update(range(len(gradients)))
        return True

    def _pack_memory(self) -> Tensor:
        if self._packed is not None and self._packed.dtype == self.reduce:
            return self._packed.zero_()
        packed = self.shard.new_zeros(self.row.plan.total, dtype=self.reduce, device=self.device)
        if self.row.zero == 1:
            self._packed = packed
        return packed

    def _tell_kept(self) -> None:
        """Let `.grad` of the parameters tell of what is kept, so that `zero_grad` finds it."""
        assert self.unreduced is not None
        # Whoever holds such a `.grad` would see the next backward in memory that is used again.
        self._packed = None
        for index in self.arrived - self._told_kept:
            contribution = self.unreduced.as_strided(*self._slots[index])
            keep_gradient(self.parameters[index], contribution, KeptGradient(self, index))
        self._told_kept = set(self.arrived)

    def _take_unreduced(self) -> tuple[Tensor | None, set[int]]:
        packed, arrived = self.unreduced, self.arrived
        if packed is None and not self._told_kept:
            self.arrived, self.reduced_next = set(), False
            return None, arrived
        for index in self._told_kept:
            # First: a `.grad` that refers here would find what the next backward packs.
            release_kept_gradient(self.parameters[index])
        self.unreduced, self.arrived, self.reduced_next = None, set(), False
        self._told_kept = set()
        return packed, arrived

    def add_kept(self, slot: int, shard: Tensor) -> None:
        """Add what the local `.grad` of a parameter held to what is kept of it."""
        assert self.unreduced is not None
        at, end = self.owned[slot]
        start = self.row.plan.start(self.group.rank)
        self.unreduced[start + at : start + end].add_(shard.to(self.device))

    def drop_slot(self, slot: int) -> None:
        """Forget what is kept of the gradient of a parameter."""
        release_kept_gradient(self.parameters[slot])
        self.arrived.discard(slot)
        self._told_kept.discard(slot)
        if not self.arrived:
            self._take_unreduced()

    def drop_unreduced(self) -> None:
        """Drop what a backward has packed, or started to reduce, that raised since."""
        if self.reduced_next:
            self.drop_kept()
        under_way, self._under_way = self._under_way, []
        for pending in under_way:
            pending.wait()  # what it sends is memory until then

    def drop_kept(self) -> None:
        """Drop what was packed and not reduced, also under `no_sync`."""
        self._take_unreduced()

    def reduced(self) -> list[Tensor | None]:
        """Return the totals of all contributions' shards; None for what got none. Collective."""
        if self.host is not None:
            return self.finish_reduce(self.start_reduce())
        packed, arrived = self._take_to_reduce()
        if packed is None:
            return [None] * len(self.parameters)
        # Cast behind it, so that rounding happens once. What is packed has no history.
        total = reduce_scatter(packed, self.group, **self._how(packed))
        return self._gradients(total, arrived)

    def start_reduce(self) -> Reduction | None:
        """Start `reduced`; None: nothing has arrived. Collective."""
        packed, arrived = self._take_to_reduce()
        if packed is None:
            return None
        # The next run of the unit may come before this is over.
        kept, self._packed = self._packed, None
        pending: Any
        if self.sends is not None and self.host is None and self._sizes is None:
            pending = self.sends(packed, self.group)
        else:
            with unrecorded():
                pending = reduce_scatter(packed, self.group, async_op=True, **self._how(packed))
        self._under_way.append(pending)
        return pending, arrived, kept

    def finish_reduce(self, started: Reduction | None) -> list[Tensor | None]:
        """What `reduced` returns, of a reduction that was started. Collective."""
        if started is None:
            return [None] * len(self.parameters)
        pending, arrived, kept = started
        self._under_way.remove(pending)
        with unrecorded():
            host = self.host
            dtype = dtype_of_sums(local_leaves(self.parameters), self.shard.dtype)
            total = pending.wait() if host is None else host.total(pending, dtype)
        if self._packed is None:
            self._packed = kept
        return self._gradients(total, arrived)

    def _take_to_reduce(self) -> tuple[Tensor | None, set[int]]:
        # Taken before it is sent: if the collective raises, nothing is reduced a second time.
        packed, arrived = self._take_unreduced()
        if packed is not None:
            self.log.record(self._events["reduces"])
        return packed, arrived

    def _how(self, packed: Tensor) -> Any:
        return {"order": order_of(packed, self.group), "sizes": self._sizes}

    def _gradients(self, total: Tensor, arrived: set[int]) -> list[Tensor | None]:
        # Where parameters keep theirs in several, autograd casts each of them.
        dtype = dtype_of_sums(local_leaves(self.parameters), self.shard.dtype)
        total = total if total.dtype is dtype else total.to(dtype)
        sizes, at = self._pieces
        # In one call. What it returns is no view for autograd, which need not know: no two of them
        # share an element, and nobody else has the total.
        shards = torch.unsafe_split_with_sizes(total, sizes)
        found: list[Tensor | None] = [shards[index] for index in at]
        if len(arrived) < len(at):
            found = [one if slot in arrived else None for slot, one in enumerate(found)]
        leaves = local_leaves(self.parameters)
        if not all(map(_wants, leaves)):
            _store_of_frozen(leaves, found)
        return found

    def flush(self) -> None:
        """Reduce what `no_sync` has kept in `unreduced`, and accumulate it. Collective."""
        for parameter, total in zip(self.parameters, self.reduced(), strict=True):
            if total is not None:
                _accumulate(local_leaf(parameter), total)

    def shards_of(self, shard: Tensor) -> list[Tensor]:
        """For each slot what this rank owns of it, as views of a shard-sized tensor."""
        return self._stored.parts_of(shard)

    def _ensure(self) -> None:
        if self._stored.ensure():
            self._begin_anew()
        self.leaves = self._stored.leaves

    def _begin_anew(self) -> None:
        """The shard is other memory: nothing that was gathered is there."""
        self.full, self._gathered_at = None, None
        self.handed, self.counted = [], []


def _store_of_frozen(leaves: Sequence[Tensor], found: list[Tensor | None]) -> None:
    """Let leaves have what arrived before they were frozen: the backward of now leads to none."""
    for slot, (leaf, total) in enumerate(zip(leaves, found, strict=True)):
        if total is not None and not leaf.requires_grad:
            found[slot] = None
            _accumulate(leaf, total)


def _accumulate(leaf: Tensor, total: Tensor) -> None:
    """Add to the gradient of a leaf, by a backward of its own, which runs its hooks."""
    is_trained = leaf.requires_grad
    try:
        leaf.requires_grad_(True).backward(total)  # type: ignore[no-untyped-call]
    finally:
        leaf.requires_grad_(is_trained)
