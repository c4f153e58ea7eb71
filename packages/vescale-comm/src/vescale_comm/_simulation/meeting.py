"""Match and compare the calls of a simulated group's members, and hold messages between them."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vescale_comm._engine.annotated_groups import BACKWARD_DIFFERS
from vescale_comm._errors import CommMismatchError
from vescale_comm._simulation import streams

Run = Callable[[Sequence[Any]], None]
_Sent = tuple[Tensor, streams.Mark | None]


@dataclass(frozen=True, slots=True)
class CallNote:
    """What a member says about its call.

    Attributes:
        call: the call of torch; equal on all, or they do not mean the same.
        more: what else this package's collectives have to agree in, such as the order of a fold;
            None where torch was called directly or by the fast path, which leave it out.
        site: where the call is.
        in_graph: whether the backward of this member is a collective as well. The fast path, which
            says nothing, is for inputs without a gradient.
    """

    call: str
    more: str | None
    site: str
    in_graph: bool = False

    def __str__(self) -> str:
        more = "" if self.more is None else f", for {self.more}"
        gradient = ", of an input that requires a gradient," if self.in_graph else ""
        return f"{self.call}{more}{gradient} at {self.site}"


@dataclass(slots=True, eq=False)
class Slot:
    """One collective: who has come, with what.

    Attributes:
        number: how many collectives this group had before.
        calls: what the members say about it.
        payloads: the members' tensors.
        done: whether the data has been moved.
        error: message of the disagreement, if there is one.
        device: the accelerator that the tensors are on; None: memory of the host.
        marks: behind what each member's stream computes for it; at the end one behind the data.
    """

    number: int
    calls: dict[int, CallNote] = field(default_factory=dict)
    payloads: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    error: str | None = None
    device: torch.device | None = None
    marks: list[streams.Mark] = field(default_factory=list)

    def disagree(self) -> bool:
        """Return whether those who have come mean different things."""
        more = {each.more for each in self.calls.values() if each.more is not None}
        different = len({each.call for each in self.calls.values()}) > 1 or len(more) > 1
        return different or self.in_graph_of_some()

    def in_graph_of_some(self) -> bool:
        """Return whether the backward would be a collective of some of those who have come only."""
        return len({each.in_graph for each in self.calls.values()}) > 1


class Meeting:
    """The members of one group, by the ranks in it."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self._slots: dict[int, Slot] = {}
        self._next: dict[int, int] = defaultdict(int)
        self._under_way: dict[tuple[int, int, int], deque[_Sent]] = defaultdict(deque)

    def arrive(self, member: int, note: CallNote, payload: Any, run: Run) -> Slot:
        """Register a member's arrival at its next collective; the last to come runs it for all."""
        # Calls are matched by their number on each member, which is how a backend matches them.
        number = self._next[member]
        self._next[member] += 1
        slot = self._slots.setdefault(number, Slot(number))
        slot.calls[member], slot.payloads[member] = note, payload
        device = streams.device_of(payload)
        if device is not None:
            slot.device = device
            slot.marks.append(streams.mark(device))
        if len(slot.calls) == len(self.ranks):
            # No other member can come to it; members that still wait hold the slot themselves.
            del self._slots[number]
            self._complete(slot, run)
        elif slot.disagree():
            # Said as soon as it is known: the others come to the same slot and are told there.
            slot.error = self._disagreement(slot)
        return slot

    def _complete(self, slot: Slot, run: Run) -> None:
        if slot.disagree():
            slot.error = self._disagreement(slot)
        else:
            try:
                # In the order of members, whatever the order of arrival: folds depend on it.
                payloads = [slot.payloads[member] for member in range(len(self.ranks))]
                if slot.device is None:
                    run(payloads)
                else:
                    _run_on_stream(slot, run, payloads)
            except Exception as error:
                slot.error = f"{slot.calls[0].call} failed: {type(error).__name__}: {error}"
        # The slot may live on in a handle: without this it would keep every member's tensors.
        slot.payloads.clear()
        slot.done = True

    def _disagreement(self, slot: Slot) -> str:
        lines = [
            f"rank {self.ranks[member]}: {slot.calls[member]}" for member in sorted(slot.calls)
        ]
        head = f"the ranks disagree about collective {slot.number} of ranks {list(self.ranks)}:"
        if slot.in_graph_of_some():
            head += f" the input of some requires a gradient, {BACKWARD_DIFFERS}"
        return "\n  ".join([head, *lines])

    def put(self, source: int, target: int, tag: int, tensor: Tensor) -> None:
        """Send a copy."""
        # Copied now: the sender may overwrite its tensor as soon as `send` has returned.
        copy, device = tensor.detach().clone(), streams.device_of(tensor)
        made = None if device is None else streams.mark(device)
        self._under_way[source, target, tag].append((copy, made))

    def sender(self, source: int | None, target: int, tag: int) -> int | None:
        """Return who has sent something to `target` (of `source`, if given); None if no member."""
        members = range(len(self.ranks)) if source is None else (source,)
        # `get`, because the dict makes an entry for every key that is indexed. Of several senders
        # the lowest: which one is first must not depend on the order in which ranks ran.
        return next((m for m in members if self._under_way.get((m, target, tag))), None)

    def take(self, source: int, target: int, tag: int) -> Tensor:
        """Receive what was sent first."""
        copy, made = self._under_way[source, target, tag].popleft()
        if made is not None:
            streams.follow(copy.device, [made], copy)
        return copy


def _run_on_stream(slot: Slot, run: Run, payloads: Sequence[Any]) -> None:
    """Move the data of members who may each compute on a stream of their own."""
    assert slot.device is not None
    streams.follow(slot.device, slot.marks, payloads)
    run(payloads)
    slot.marks = [streams.mark(slot.device)]


def finish(slot: Slot) -> None:
    """Have a member's result, or raise on each of the ranks what is wrong with the collective."""
    if slot.error is not None:
        raise CommMismatchError(slot.error)
    if slot.device is not None:
        streams.follow(slot.device, slot.marks)
