"""Tensors and small objects between the ranks of a pipeline.

From one rank to another messages arrive in the order in which they are sent, and that order follows
from the schedule. A receiver that needs a later one takes the earlier ones first, and keeps them.

On NCCL a rank carries out what it sends and receives by one communicator one after another, and a
send ends with its receive. So a message that nobody takes yet would stop those behind it, from and
to whomever they are: V-shaped schedules would wait for ever. Hence `lanes_of`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from vescale_comm import Group, Pending, broadcast, recv, send

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.trace.tensor_specs import TensorSpec, as_strided_like
from vescale_parallel._pipeline.trace.text import from_text, to_text
from vescale_parallel._schedules.actions import Action, Schedule

Way = Literal["forward", "backward"]

_LIKES: Final = 1024
"""For how many kinds of tensors it is remembered what they are like."""

_MOST_BYTES: Final = 1 << 28
"""Of what one rank tells another in words."""


class Message(NamedTuple):
    """What passes between two stages for one microbatch.

    Attributes:
        way: "forward": arguments of a block; "backward": their gradients.
        stage: the stage that receives it.
        microbatch: its index.
    """

    way: Way
    stage: int
    microbatch: int


def message_into(action: Any, stages: int) -> tuple[Message | None, Message | None]:
    """What an action needs from another stage, and what it gives to one."""
    kind, stage, microbatch = action
    if kind == "W":
        return None, None
    if kind == "F":
        needs = Message("forward", stage, microbatch) if stage else None
        gives = Message("forward", stage + 1, microbatch) if stage + 1 < stages else None
    else:
        needs = Message("backward", stage, microbatch) if stage + 1 < stages else None
        gives = Message("backward", stage - 1, microbatch) if stage else None
    return needs, gives


class PendingReceive:
    """Tensors on their way to this rank.

    Args:
        handles: one for each.
        specs: what they are like.
    """

    def __init__(self, handles: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
        self._handles, self._specs = deque(handles), specs

    def wait(self) -> list[Tensor]:
        """Return them, once they are here."""
        return _in_order(self._waited(), self._specs)

    def drop(self) -> None:
        """Let them come, also where a `wait` was interrupted amid them."""
        self._waited()

    def _waited(self) -> list[Tensor]:
        found = []
        while self._handles:
            # Each handle once: one whose wait was interrupted has ended with it.
            found.append(self._handles.popleft().wait())
        return found


def _in_order(flats: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    # Sent in the memory order of the sender, which the spec holds: kernels may choose by strides,
    # and bits would differ.
    return [as_strided_like(one, spec) for one, spec in zip(flats, specs, strict=True)]


def lanes_of(stage_ranks: Sequence[int]) -> dict[tuple[int, int], int]:
    """By sender and receiver, the number of the group by which messages go from one to the other.

    No rank has two of them in one lane, so that in each it only sends to one rank, or only receives
    from one. As few as that takes: four where stages go from rank to rank and back, two of two
    ranks, up to six where they go round in a circle.

    Args:
        stage_ranks: for each stage the rank that has it.
    """
    # Backwards return on the way on which forwards came.
    there = {(a, b) for a, b in pairwise(stage_ranks) if a != b}
    found: dict[tuple[int, int], int] = {}
    busy: list[set[int]] = []
    for pair in sorted(there | {(b, a) for a, b in there}):
        lane = next((at for at, ranks in enumerate(busy) if ranks.isdisjoint(pair)), len(busy))
        if lane == len(busy):
            busy.append(set())
        busy[lane].update(pair)
        found[pair] = lane
    return found


class Lines:
    """This rank's connections to the other ranks of its pipeline.

    Attributes:
        ranks: the processes of the pipeline, in the order of its axis.

    Args:
        lanes: groups of these ranks: the first one also carries what goes to all.
        numbers: by sender and receiver, in which of them messages go.
        device: of the tensors.
    """

    def __init__(
        self, lanes: Sequence[Group], numbers: Mapping[tuple[int, int], int], device: str
    ) -> None:
        # All groups are made by every rank of the world in one order, also by those that send
        # nothing.
        self._all, self._lanes = lanes[0], {pair: lanes[at] for pair, at in numbers.items()}
        self.device = device
        self.rank, self.size, self.ranks = self._all.rank, self._all.size, self._all.ranks
        self._likes: dict[TensorSpec, Tensor] = {}
        # Of the specs of a whole message, by `id`: those of a kind stay the same object.
        self._of_message: dict[int, tuple[Sequence[TensorSpec], list[Tensor]]] = {}
        # NCCL makes the communicator of a group in its first call, in which every member then has
        # to take part, and waits: in a step some would come late, and others not at all.
        for lane in lanes if self.size > 1 else ():
            broadcast(torch.zeros(1, device=device), lane, source=0)

    def _line(self, source: int, target: int) -> Group:
        return self._lanes[source, target]

    def send(self, tensors: Sequence[Tensor], target: int) -> list[Pending[None]]:
        """Start to send tensors; their memory must stay as it is until the handles are waited."""
        group = self._line(self.rank, target)
        return [send(one, group, target=target, async_op=True) for one in tensors]

    def recv(self, specs: Sequence[TensorSpec], source: int) -> list[Tensor]:
        """Receive local tensors."""
        group = self._line(source, self.rank)
        flats = [recv(self._like(spec), group, source=source) for spec in specs]
        return _in_order(flats, specs)

    def start_recv(self, specs: Sequence[TensorSpec], source: int) -> PendingReceive:
        """Start to receive local tensors, for which their memory is taken at once."""
        group = self._line(source, self.rank)
        known, likes = self._of_message.get(id(specs), (None, []))
        if known is not specs:
            likes = [self._like(one) for one in specs]
            if len(self._of_message) < _LIKES:
                self._of_message[id(specs)] = specs, likes
        starts = [recv(one, group, source=source, async_op=True) for one in likes]
        return PendingReceive(starts, specs)

    def _like(self, spec: TensorSpec) -> Tensor:
        like = self._likes.get(spec)
        if like is None:
            # Of one element: it only says what comes.
            like = torch.empty((), dtype=spec.dtype, device=self.device).expand(spec.shape)
            if len(self._likes) < _LIKES:
                self._likes[spec] = like
        return like

    def send_object(self, value: Any, target: int) -> list[Pending[None]]:
        """Start to send something small, see `to_text`."""
        content = self._bytes(to_text(value))
        length = torch.tensor([content.numel()], device=self.device)
        return self.send([length, content], target)

    def recv_object(self, source: int) -> Any:
        """Receive what `send_object` sends."""
        group = self._line(source, self.rank)
        length = recv(torch.empty(1, dtype=torch.int64, device=self.device), group, source=source)
        like = torch.empty(_size(length), dtype=torch.uint8, device=self.device)
        return _value(recv(like, group, source=source))

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Give something small of one rank to all ranks of the pipeline."""
        group = self._all
        # Only there: elsewhere the value may be a stand-in that no text describes.
        text = to_text(value) if self.rank == source else ""
        content = self._bytes(text)
        length = torch.tensor([content.numel()], device=self.device)
        length = broadcast(length, group, source=source)
        if self.rank != source:
            content = torch.empty(_size(length), dtype=torch.uint8, device=self.device)
        return _value(broadcast(content, group, source=source))

    def _bytes(self, text: str) -> Tensor:
        # Never empty: there are no buffers of nothing.
        return torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(self.device)

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        """Give a tensor of one rank to all ranks of the pipeline."""
        return broadcast(value, self._all, source=source)


def _size(length: Tensor) -> int:
    size = int(length.item())
    if not 0 < size <= _MOST_BYTES:
        raise PipelineError(f"a stage was told to expect {size} bytes: no stage says so much")
    return size


def _value(content: Tensor) -> Any:
    return from_text(bytes(content.cpu().tolist()).decode())


class Traffic(NamedTuple):
    """What a schedule lets pass to and from one rank: the same in each step.

    Attributes:
        passes: for each action of this rank what it needs from another stage, and gives to one.
        takers: for each message the rank that takes it, and at which of its actions.
        coming: by sender, the messages that it sends here, and at which of its actions each.
        senders: for each message that comes here, who sends it.
    """

    passes: dict[Action, tuple[Message | None, Message | None]]
    takers: dict[Message, tuple[int, int]]
    coming: dict[int, list[tuple[Message, int]]]
    senders: dict[Message, int]


# By the schedule, of which a model has two or three, one for training and its forwards, and as many
# for each number of microbatches of a smaller batch.
@lru_cache(maxsize=64)
def traffic_of(schedule: Schedule, own: int) -> Traffic:
    """Return what passes by a schedule; nobody may write to it."""
    found = Traffic({}, {}, {}, {})
    for rank, row in enumerate(schedule.ranks):
        for at, action in enumerate(row):
            needs, gives = message_into(action, schedule.stages)
            if rank == own:
                found.passes[action] = needs, gives
            if needs is not None:
                found.takers[needs] = (rank, at)
            # In the order of the sender's row, which is the order in which it sends.
            if gives is None or schedule.stage_ranks[gives.stage] != own:
                continue
            if rank != own:
                found.coming.setdefault(rank, []).append((gives, at))
                found.senders[gives] = rank
    return found


class Inbox:
    """What other ranks send to this one during a step, in the order in which they send it.

    The next message of each sender is waited for in the background: it comes while this rank
    computes, and its sender need not ask first. The price is memory for one message of each. A GPU
    that runs streams one after another, having more of them than queues, would otherwise wait for
    ever: a send that waits for its receiver stops what this rank computes for it.

    Args:
        lines: the connections.
        schedule: who does what in which order.
        specs: what a message consists of.

    Attributes:
        passes: for each action what it needs from another stage, and gives to one.
        takers: for each message the rank that takes it, and at which of its actions.
        seen: by rank, the action from which the latest message came: it has done those before.
    """

    def __init__(
        self,
        lines: Lines,
        schedule: Schedule,
        specs: Callable[[Message], Sequence[TensorSpec]],
    ) -> None:
        self._lines, self._specs = lines, specs
        self._kept: dict[Message, list[Tensor]] = {}
        traffic = traffic_of(schedule, lines.rank)
        self.passes, self.takers = traffic.passes, traffic.takers
        self._senders = traffic.senders
        # By sender: what is left of it.
        self._coming = {sender: deque(every) for sender, every in traffic.coming.items()}
        self._started: dict[int, PendingReceive] = {}
        self.seen: dict[int, int] = {}

    def begin(self) -> None:
        """Start to receive: from here on all that is to come has to be taken, or drained."""
        for sender in self._coming:
            self._start(sender)

    def put(self, message: Message, tensors: list[Tensor]) -> None:
        """Keep what a stage of this rank gives to another one of this rank."""
        self._kept[message] = tensors

    def take(self, message: Message) -> list[Tensor]:
        """Return a message, once it has come."""
        while message not in self._kept:
            self._keep_next(self._senders[message])
        return self._kept.pop(message)

    def skip(self, message: Message) -> None:
        """Receive and drop a message, if it comes from another rank and has not been taken."""
        sender = self._senders.get(message)
        if sender is None:
            return
        while message in [one for one, _ in self._coming[sender]]:
            self._drop_next(sender)
        self._kept.pop(message, None)

    def _keep_next(self, sender: int) -> None:
        # Perhaps not the wanted one: on one communicator messages come in the order in which they
        # were sent.
        message, at = self._coming[sender][0]
        self._kept[message] = self._next(sender)
        # Its row up to there is done, so its receiver knows what else has been taken.
        self.seen[sender] = at

    def drain(self) -> None:
        """Receive and drop what is still to come, so that no sender waits for this rank."""
        for sender, coming in self._coming.items():
            while coming:
                self._drop_next(sender)
        self._kept.clear()

    def _next(self, sender: int) -> list[Tensor]:
        """Wait for the next message of a sender, and start to receive the one behind it."""
        found = self._started[sender].wait()
        self._go_on(sender)
        return found

    def _drop_next(self, sender: int) -> None:
        self._started[sender].drop()
        self._go_on(sender)

    def _go_on(self, sender: int) -> None:
        # Only now: a message whose wait was interrupted is still to come.
        self._coming[sender].popleft()
        del self._started[sender]
        self._start(sender)

    def _start(self, sender: int) -> None:
        coming = self._coming[sender]
        if coming:
            self._started[sender] = self._lines.start_recv(self._specs(coming[0][0]), sender)
