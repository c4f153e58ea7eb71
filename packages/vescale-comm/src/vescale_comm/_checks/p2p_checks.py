"""Checks of messages between two members: the sender announces its message, the receiver compares.

The sender does not wait for the answer, because sending first and receiving afterwards is a correct
program. So a message that does not fit is reported by the receiver, with the lines of both.
"""

import json
import weakref
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from vescale_comm._engine.hooks import Proceed
from vescale_comm._engine.primitives import PointToPoint, Primitive
from vescale_comm._engine.waitable import Waitable
from vescale_comm._errors import CommMismatchError, CommTimeoutError
from vescale_comm._torch.call_site import call_site

# How many messages went from a member to another: both count alike.
# Weak: a group that is destroyed and made again starts from one on every member.
_counted: "weakref.WeakKeyDictionary[ProcessGroup, Counter[tuple[int, int]]]" = (
    weakref.WeakKeyDictionary()
)
_PREFIX = "vescale_comm/message"


def checked_message(
    primitive: Primitive, proceed: Proceed, store: Store, timeout: float
) -> Waitable | None:
    """Send or receive what fits, and raise on the receiver what does not.

    Raises:
        CommMismatchError: what is sent has another shape or dtype than what is expected.
        CommTimeoutError: the sender does not come.
    """
    assert isinstance(primitive, PointToPoint)
    site, group = call_site(), primitive.group
    if primitive.op == "send":
        ((_, target),) = primitive.sends
        # Before the send: a receiver that already waits reads it as soon as the data can come.
        store.set(_key(primitive, group.rank, target), json.dumps([_said(primitive), site]))
        return proceed()
    ((_, source),) = primitive.receives
    expected = _ExpectedMessage(primitive, _key(primitive, source, group.rank), source, site, store)
    if not primitive.later:
        expected.compare(timeout)
        return proceed()
    # Compared at wait(), not here: an asynchronous receive must not block its caller.
    # Its place among the messages was counted above, when it was issued: waits may come in any
    # order.
    work = proceed()
    return None if work is None else _ComparedWork(work, expected, timeout)


def _key(primitive: Primitive, source: int, target: int) -> str:
    counter = _counted.setdefault(primitive.group.process_group, Counter())
    # A key for each message: messages between two members arrive in the order of sending.
    counter[source, target] += 1
    return f"{_PREFIX}/{source}/{target}/{counter[source, target]}"


def _said(primitive: Primitive) -> str:
    x = primitive.x
    assert x is not None
    return f"{x.dtype} {tuple(x.shape)}"


@dataclass(frozen=True, slots=True, eq=False)
class _ExpectedMessage:
    """What a receiver expects, and where the sender says what it sends."""

    primitive: PointToPoint
    key: str
    source: int
    site: str
    store: Store

    def compare(self, timeout: float, work: Waitable | None = None) -> None:
        """Wait for what the sender says; `work` is the reception, where it has begun."""
        ranks = self.primitive.group.ranks
        here = f"recv of {_said(self.primitive)} at {self.site}"
        try:
            self.store.wait([self.key], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise CommTimeoutError(
                f"{here}: waited {timeout:g} s in vain for rank {ranks[self.source]} to send"
            ) from error
        sent, site = json.loads(self.store.get(self.key))
        # Read once, by its only receiver: otherwise the store would grow with every message.
        self.store.delete_key(self.key)
        if sent == _said(self.primitive):
            return
        # A synchronous receive has not started; an asynchronous one has the message already.
        if work is None:
            self._drain(sent)
        raise CommMismatchError(
            f"what is sent is not what is received:\n  rank {ranks[self.source]}: send of {sent} "
            f"at {site}\n  rank {dist.get_rank()}: {here}"
        )

    def _drain(self, sent: str) -> None:
        """Receive and drop the message, or the next receive would get it."""
        dtype, _, shape = sent.removeprefix("torch.").partition(" ")
        # Read back from the announcement: only the sender knows how much memory its message fills.
        extents = [int(each) for each in shape.strip("(),").split(",") if each]
        like: torch.Tensor = self.primitive.receives[0][0]
        out = torch.empty(extents, dtype=getattr(torch, dtype), device=like.device).view(-1)
        group = self.primitive.group
        drained = PointToPoint("recv", group, 0, self.primitive.x, [], [(out, self.source)])
        # Not through the hooks: this receive is no call of the program.
        drained.launch(group.process_group, False)


@dataclass(frozen=True, slots=True, eq=False)
class _ComparedWork:
    work: Waitable
    expected: _ExpectedMessage
    timeout: float

    def wait(self) -> object:
        """Compare what was sent, and wait for it."""
        self.expected.compare(self.timeout, self.work)
        return self.work.wait()
