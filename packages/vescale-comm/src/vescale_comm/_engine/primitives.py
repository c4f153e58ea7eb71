"""Primitives: the few movements that every collective is made of.

A collective is a generator that yields primitives and is resumed with the tensors that arrived.
Whoever drives the generator decides how a primitive is carried out: `runner` calls torch, and
waits at once or later, or gives a tracer the functional form; `Emulator` moves the data of all
members in one process.
"""

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vescale_comm._engine import reference_semantics
from vescale_comm._engine.direct_exchange import PairSum, gathers, is_small, start_gather, sums_pair
from vescale_comm._engine.waitable import Waitable
from vescale_comm._groups.connection import (
    barrier_devices,
    connect,
    connects_late,
    note_connected,
)
from vescale_comm._groups.group import Group
from vescale_comm._wire.backend_dtypes import as_backend_dtype

# The same functions under the names that torch gave them later; the old ones warn there.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OF_TWO = ("send", "recv")
"""Messages that other members know nothing of."""
_OF_ALL = 5643
"""The tag of messages that a collective is made of: those of two, and torch's own, have 0."""

Sizes = tuple[int, ...]
Result = TypeVar("Result")
Steps = Generator["Primitive", list[Tensor], Result]
"""A collective under way: yields what is to be sent, is given what came, returns the result."""


@dataclass(slots=True, eq=False)
# eq=False here and below: a comparison of fields would compare tensors element by element, and
# calls that look alike are still two calls.
class Primitive(ABC):
    """One movement of one member.

    Attributes:
        op: name of the collective that it is part of, for traces and messages.
        group: group that it runs on.
        sent: bytes that this rank sends.
        x: the member's input as the caller gave it, for traces and messages.
        detail: what else the members have to agree in; printed only where that is compared.
        later: whether it is waited for later, and not at once.
        in_graph: whether autograd gets a node for its result, so that the backward of this rank is
            a collective as well.
    """

    op: str
    group: Group
    sent: int
    x: Tensor | None
    # Keyword-only, so that the fields of subclasses without a default may follow.
    detail: object = field(default=None, kw_only=True)
    later: bool = field(default=False, kw_only=True)
    in_graph: bool = field(default=False, kw_only=True)

    def common(self) -> str:
        """Return what is the same on all members, or they do not mean the same."""
        detail = "" if self.detail is None else f" ({self.detail!r})"
        return f"{self.op}{detail} as {type(self).__name__}{self._common()}"

    def _common(self) -> str:
        return ""

    def traffic(self) -> tuple[list[int], list[int]] | None:
        """Return what goes to and comes from each member, where that differs between members."""
        return None

    @abstractmethod
    def launch(self, process_group: ProcessGroup, async_op: bool) -> Any:
        """Hand it to torch; return what can be waited for, if asynchronous."""

    @abstractmethod
    def written(self) -> list[Tensor]:
        """Return the tensors that hold the result when it is complete."""

    @abstractmethod
    def emulate(self, members: Sequence[Any]) -> None:
        """Do what it does for all members at once; `members` are theirs, in order."""


@dataclass(slots=True, eq=False)
class Reduce(Primitive):
    """Reduces `buffer` in place: on every member, or only on member `root`."""

    buffer: Tensor
    how: dist.ReduceOp.RedOpType
    root: int | None = None

    def launch(self, process_group: ProcessGroup, async_op: bool) -> Any:
        """Call torch's all_reduce, or reduce."""
        if self.root is None:
            x, group = self.buffer, self.group
            backend = group.backends.get(x.device.type)
            if sums_pair(backend, group.size, x.dtype, self.how) and is_small(x):
                started = PairSum(process_group, x, group.rank, x)
                return started if async_op else started.wait()
            return dist.all_reduce(self.buffer, self.how, process_group, async_op)
        # torch counts a root by global rank, also within a group.
        target = self.group.ranks[self.root]
        return dist.reduce(self.buffer, target, self.how, process_group, async_op)

    def _common(self) -> str:
        to = "" if self.root is None else f" to member {self.root}"
        return f"[{self.how.name}] of {self.buffer.dtype} {tuple(self.buffer.shape)}{to}"

    def written(self) -> list[Tensor]:
        """Return the buffer."""
        return [self.buffer]

    def emulate(self, members: Sequence["Reduce"]) -> None:
        """Fold the members' buffers, first to last."""
        total = reference_semantics.reduced([each.buffer for each in members], self.how.name)
        for member, each in enumerate(members):
            # Away from the root a backend leaves anything in the buffer; here it stays as it was.
            if self.root in (None, member):
                each.buffer.copy_(total)


@dataclass(slots=True, eq=False)
class AllGather(Primitive):
    """Fills `out` with the members' `flat`, of `sizes` elements each."""

    flat: Tensor
    out: Tensor
    sizes: Sizes

    def launch(self, process_group: ProcessGroup, async_op: bool) -> Any:
        """Call torch's all_gather; in unequal parts, everyone sends to everyone."""
        flat, out = as_backend_dtype(self.flat), self.out
        if len(set(self.sizes)) == 1:
            group = self.group
            if gathers(group.backends.get(out.device.type), out):
                received = as_backend_dtype(out)
                work = start_gather(process_group, received, flat, group.rank, group.size)
                return work if async_op else work.wait()
            return all_gather_single(
                as_backend_dtype(out), flat, group=process_group, async_op=async_op
            )
        # gloo gathers equal shards only. Sending to every member is the same traffic and pads
        # nothing; an all-to-all would be too, but takes its input repeated for each member.
        # Views of `out`: what is received into them is the result, without another copy.
        received = as_backend_dtype(out)
        # A dtype that travels as bytes has more elements.
        width = 1 if received is out else out.element_size()
        pieces = torch.split(received, _scaled(self.sizes, width))
        pieces[self.group.rank].copy_(flat)
        others = [member for member in range(self.group.size) if member != self.group.rank]
        # Launched directly and not through the hooks: a trace and `checked` see one all-gather.
        transfers = PointToPoint(
            self.op,
            self.group,
            self.sent,
            self.x,
            [(flat, member) for member in others],
            [(pieces[member], member) for member in others],
        )
        return transfers.launch(process_group, async_op)

    def _common(self) -> str:
        return f" of {self.flat.dtype} {list(self.sizes)}"

    def written(self) -> list[Tensor]:
        """Return the buffer of all parts."""
        return [self.out]

    def emulate(self, members: Sequence["AllGather"]) -> None:
        """Give every member all parts."""
        reference_semantics.concatenate(
            [as_backend_dtype(m.flat) for m in members], [as_backend_dtype(m.out) for m in members]
        )


@dataclass(slots=True, eq=False)
class ReduceScatter(Primitive):
    """Reduces the members' `flat` and leaves each its part, of `sizes[rank]` elements, in `out`."""

    flat: Tensor
    out: Tensor
    sizes: Sizes
    how: dist.ReduceOp.RedOpType

    def launch(self, process_group: ProcessGroup, async_op: bool) -> Any:
        """Call torch's reduce_scatter, in the form that equal or other parts have."""
        if len(set(self.sizes)) == 1:
            return reduce_scatter_single(
                self.out, self.flat, op=self.how, group=process_group, async_op=async_op
            )
        # Only the form that takes a list has parts of different sizes.
        pieces = list(torch.split(self.flat, list(self.sizes)))
        return dist.reduce_scatter(self.out, pieces, self.how, process_group, async_op)

    def _common(self) -> str:
        return f"[{self.how.name}] of {self.flat.dtype} {list(self.sizes)}"

    def written(self) -> list[Tensor]:
        """Return the member's part."""
        return [self.out]

    def emulate(self, members: Sequence["ReduceScatter"]) -> None:
        """Fold the members' buffers, first to last, and split the result."""
        total = reference_semantics.reduced([each.flat for each in members], self.how.name)
        for each, piece in zip(members, torch.split(total, list(self.sizes)), strict=True):
            each.out.copy_(piece)


def _scaled(sizes: Sizes, width: int) -> list[int]:
    # Of as many entries as there are ranks, at each call: the common case must not be a loop.
    return list(sizes) if width == 1 else [width * size for size in sizes]


@dataclass(slots=True, eq=False)
class AllToAll(Primitive):
    """Sends `send[i]` elements of `flat` to member i; `out` gets `receive[i]` from it."""

    flat: Tensor
    out: Tensor
    send: Sizes
    receive: Sizes

    def launch(self, process_group: ProcessGroup, async_op: bool) -> Any:
        """Call torch's all_to_all."""
        out = as_backend_dtype(self.out)
        # Sizes count elements of what is sent, and a dtype that travels as bytes has more of them.
        width = 1 if out.dtype == self.out.dtype else self.out.element_size()
        return dist.all_to_all_single(
            out,
            as_backend_dtype(self.flat),
            _scaled(self.receive, width),
            _scaled(self.send, width),
            process_group,
            async_op,
        )

    def _common(self) -> str:
        # Sizes differ between members by nature: they are compared pairwise, as `traffic`.
        return f" of {self.flat.dtype}"

    def traffic(self) -> tuple[list[int], list[int]]:
        """Return the extents, in elements."""
        return list(self.send), list(self.receive)

    def written(self) -> list[Tensor]:
        """Return the buffer of what came."""
        return [self.out]

    def emulate(self, members: Sequence["AllToAll"]) -> None:
        """Give every member its part of each buffer."""
        reference_semantics.exchange(
            [each.flat for each in members],
            [each.out for each in members],
            [each.send for each in members],
        )


@dataclass(slots=True, eq=False)
class Broadcast(Primitive):
    """Gives every member the `buffer` of member `root`."""

    buffer: Tensor
    root: int

    def launch(self, process_group: ProcessGroup, async_op: bool) -> Any:
        """Call torch's broadcast."""
        # torch counts a source by global rank, also within a group.
        source = self.group.ranks[self.root]
        work = dist.broadcast(as_backend_dtype(self.buffer), source, process_group, async_op)
        note_connected(self.group, self.buffer.device.type)
        return work

    def _common(self) -> str:
        return f" of {self.buffer.dtype} {tuple(self.buffer.shape)} from member {self.root}"

    def written(self) -> list[Tensor]:
        """Return the buffer."""
        return [self.buffer]

    def emulate(self, members: Sequence["Broadcast"]) -> None:
        """Copy the root's buffer."""
        for each in members:
            each.buffer.copy_(members[self.root].buffer)


@dataclass(slots=True, eq=False)
class PointToPoint(Primitive):
    """Sends tensors to members and fills others with what members send here.

    Empty ones are not sent: both sides know that they are. A member's own are copied.
    """

    sends: list[tuple[Tensor, int]]
    receives: list[tuple[Tensor, int]]

    def launch(self, process_group: ProcessGroup, async_op: bool) -> Any:
        """Call torch's isend and irecv for all at once."""
        me, ranks = self.group.rank, self.group.ranks
        tag = 0 if self.op in _OF_TWO else _OF_ALL
        alone = self._alone()
        if alone is not None:
            call, x, member = alone
            named = {"group_dst" if call is dist.isend else "group_src": member, "tag": tag}
            work = call(as_backend_dtype(x), group=process_group, **named)
            return work if async_op or work is None else work.wait()
        if self.x is not None and self.op not in _OF_TWO:
            connect(self.group, self.x.device)
        # A backend cannot send to itself: these are copied, in the order of sending.
        own = deque(tensor for tensor, member in self.sends if member == me)
        transfers = [
            dist.P2POp(dist.isend, as_backend_dtype(tensor), ranks[member], process_group, tag)
            for tensor, member in self.sends
            if member != me and tensor.numel()
        ]
        for tensor, member in self.receives:
            if member == me:
                tensor.copy_(own.popleft())
            elif tensor.numel():
                received, source = as_backend_dtype(tensor), ranks[member]
                transfers.append(dist.P2POp(dist.irecv, received, source, process_group, tag))
        # Started together: one by one, two members that both send first would wait for each other.
        works = _All(tuple(dist.batch_isend_irecv(transfers) if transfers else ()))
        return works if async_op else works.wait()

    def _alone(self) -> tuple[Any, Tensor, int] | None:
        """The only transfer, its tensor and the other member, where it is best not in a list."""
        if len(self.sends) + len(self.receives) != 1:
            return None
        x, member = (self.sends or self.receives)[0]
        if member == self.group.rank or not x.numel():
            return None
        # For gloo a list of one costs as much again as the call. NCCL would make a list its first
        # call with all members, of which only two are here: by itself a message is between two.
        is_gloo = self.group.backends.get(x.device.type) == "gloo"
        if not is_gloo and not (self.op in _OF_TWO and connects_late(self.group, x.device.type)):
            return None
        return (dist.isend if self.sends else dist.irecv), x, member

    def _common(self) -> str:
        # No shape: a member's own says nothing about the others', and `traffic` is compared
        # instead.
        return "" if self.x is None else f" of {self.x.dtype}"

    def traffic(self) -> tuple[list[int], list[int]]:
        """Return the elements to and from each member."""
        send, receive = [0] * self.group.size, [0] * self.group.size
        for tensor, member in self.sends:
            send[member] += tensor.numel()
        for tensor, member in self.receives:
            receive[member] += tensor.numel()
        return send, receive

    def written(self) -> list[Tensor]:
        """Return what is received."""
        return [tensor for tensor, _ in self.receives]

    def emulate(self, members: Sequence["PointToPoint"]) -> None:
        """Deliver to every member what was sent to it, in the order of sending."""
        # A queue for each pair: several tensors between two members arrive in the order of sending.
        under_way: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        for source, each in enumerate(members):
            for tensor, target in each.sends:
                # All sends are queued before any receive is filled, as if every member had sent
                # first.
                under_way[source, target].append(tensor)
        for target, each in enumerate(members):
            for tensor, source in each.receives:
                tensor.copy_(under_way[source, target].popleft())


@dataclass(slots=True, eq=False)
class Barrier(Primitive):
    """Completes when every member has reached it; carries no data."""

    def launch(self, process_group: ProcessGroup, async_op: bool) -> Any:
        """Call torch's barrier."""
        return dist.barrier(process_group, async_op, barrier_devices(self.group.backends))

    def written(self) -> list[Tensor]:
        """Return nothing."""
        return []

    def emulate(self, members: Sequence["Barrier"]) -> None:
        """Do nothing: all are there."""
        pass


@dataclass(frozen=True, slots=True)
class _All:
    """Several transfers, waited for as one."""

    works: Sequence[Waitable]

    def wait(self) -> None:
        """Wait for each."""
        for work in self.works:
            work.wait()
