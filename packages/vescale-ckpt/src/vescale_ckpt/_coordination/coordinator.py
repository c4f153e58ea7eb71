"""How ranks agree: each tells all the others, in bytes. Failing is something they tell, too."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vescale_ckpt._errors import (
    CheckpointError,
    CoordinationError,
    as_checkpoint_error,
    error_of_kind,
    listed,
)

_LENGTH_BYTES = 8
# Of a message this much goes with its length: as many bytes over all ranks, and at least so many.
_FIRST_BYTES = 64 << 10
SHORT_BYTES = 256


class Coordinator(Protocol):
    """The ranks that save or load together."""

    rank: int
    world_size: int

    def exchange(self, message: bytes) -> list[bytes]:
        """Give every rank's message to every rank, in rank order. Called by all, or none."""
        ...

    def start(self, message: bytes) -> Callable[[], list[bytes]]:
        """Begin an `exchange` that goes on while the caller does something else, then calls this.

        For at most `SHORT_BYTES`. Other ranks may take part in it by `exchange`.
        """
        ...

    def background(self) -> "Coordinator":
        """Return the same ranks, for another thread. Called by all, or none."""
        ...


class SingleProcess:
    """One process."""

    rank = 0
    world_size = 1

    def exchange(self, message: bytes) -> list[bytes]:
        """Return its own message."""
        return [message]

    def start(self, message: bytes) -> Callable[[], list[bytes]]:
        """Return its own message, when called."""
        return lambda: [message]

    def background(self) -> Coordinator:
        """Return itself: it talks to nobody."""
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SingleProcess)

    __hash__ = None  # type: ignore[assignment]


class GroupCoordinator:
    """The ranks of a torch process group; `None` is the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        if self.rank < 0:
            raise CoordinationError("this process is not a member of the group that was given")
        # NCCL and its like move device memory only. Everything else takes CPU tensors.
        device_only = dist.get_backend(group) in ("nccl", "xccl", "hccl")
        accelerator = torch.accelerator.current_accelerator() if device_only else None
        self.device = torch.device("cpu") if accelerator is None else accelerator

    def __eq__(self, other: object) -> bool:
        """Compare the groups of ranks; a group made anew is another one."""
        return isinstance(other, GroupCoordinator) and self._own_group() is other._own_group()

    __hash__ = None  # type: ignore[assignment]

    def _own_group(self) -> object:
        return self.group if self.group is not None else dist.group.WORLD

    def background(self) -> Coordinator:
        """Make a gloo group: collectives of two threads on one group would get mixed up."""
        try:
            return GroupCoordinator(self._new_group())
        except RuntimeError as error:
            raise CoordinationError(f"a gloo group for the background failed: {error}") from error

    def _new_group(self) -> dist.ProcessGroup:
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        if self.world_size == dist.get_world_size():
            group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo")
            return group
        # torch calls a group that only its members make after how many groups a process is in, and
        # waits for ever if they disagree: who is in fewer makes some of its own, alone.
        counts = [int(count) for count in self.exchange(str(_groups_of_this_process()).encode())]
        for _ in range(max(counts) - counts[self.rank]):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return group

    def exchange(self, message: bytes) -> list[bytes]:
        """Run one collective, and a second one for what of long messages is left."""
        with self._lost():
            return self._exchange(message)

    def start(self, message: bytes) -> Callable[[], list[bytes]]:
        """Start the one collective that a short message takes."""
        assert len(message) <= SHORT_BYTES
        with self._lost():
            first = self._beginning(message)
            gathered = self._gather(first, self._first_bytes, async_op=True)

        def finish() -> list[bytes]:
            with self._lost():
                return list(map(_message, gathered()))

        return finish

    @contextmanager
    def _lost(self) -> Iterator[None]:
        # torch reports a peer that died, and a timeout, as RuntimeError.
        try:
            yield
        except RuntimeError as error:
            raise CoordinationError(
                f"rank {self.rank} lost the other ranks (one died, or left the call): {error}"
            ) from error

    @property
    def _first_bytes(self) -> int:
        # Every collective costs each rank a wait for the slowest: short messages go with the
        # lengths. How much goes there must follow from what all ranks know.
        return _LENGTH_BYTES + max(SHORT_BYTES, _FIRST_BYTES // self.world_size)

    def _beginning(self, message: bytes) -> bytes:
        length = len(message).to_bytes(_LENGTH_BYTES, "little")
        return (length + message)[: self._first_bytes]

    def _exchange(self, message: bytes) -> list[bytes]:
        begun = self._gather(self._beginning(message), self._first_bytes)()
        longest = max(map(_size, begun))
        room = self._first_bytes - _LENGTH_BYTES
        if longest > room:
            rest = self._gather(message[room:], longest - room)()
            begun = [a + b for a, b in zip(begun, rest, strict=True)]
        return list(map(_message, begun))

    def _gather(
        self, message: bytes, nbytes: int, *, async_op: bool = False
    ) -> Callable[[], list[bytes]]:
        # Bytes in uint8 tensors, not object collectives: those unpickle what they receive.
        padded = bytearray(message.ljust(nbytes, b"\0"))
        own = torch.frombuffer(padded, dtype=torch.uint8).to(self.device)
        every = [torch.empty_like(own) for _ in range(self.world_size)]
        work = dist.all_gather(every, own, group=self.group, async_op=async_op)

        def finish() -> list[bytes]:
            if work is not None:
                work.wait()
            return [data.cpu().numpy().tobytes() for data in every]

        return finish


def _size(gathered: bytes) -> int:
    return int.from_bytes(gathered[:_LENGTH_BYTES], "little")


def _message(gathered: bytes) -> bytes:
    return gathered[_LENGTH_BYTES : _LENGTH_BYTES + _size(gathered)]


def _groups_of_this_process() -> int:
    # Not public; where it is not there, names are made in another way that needs no care.
    world = getattr(dist.distributed_c10d, "_world", None)
    return len(getattr(world, "pg_names", ()))


def coordinator_of(group: dist.ProcessGroup | None) -> Coordinator:
    """Return the ranks of `group`, or of the default group, or this process alone."""
    if group is not None or (dist.is_available() and dist.is_initialized()):
        return GroupCoordinator(group)
    return SingleProcess()


def all_or_none(coordinator: Coordinator, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank; every rank gets the results of all, or every rank raises.

    The result of `work` must be JSON. If it raises on some rank, all raise an error of that
    rank's kind, with its words.
    """
    # Every rank reaches the exchange, whatever happened: one that raised before it would leave
    # the others waiting.
    failure: Exception | None = None
    answer: dict[str, Any]
    try:
        answer = {"done": work()}
    except Exception as error:
        failure = error
        told = as_checkpoint_error(error)
        answer = {"failed": type(told).__name__, "because": str(told)}
    answers = [json.loads(text) for text in coordinator.exchange(json.dumps(answer).encode())]
    failed = [rank for rank, other in enumerate(answers) if "failed" in other]
    if failed:
        raise _common_error(answers, failed) from failure
    return [other["done"] for other in answers]


def _common_error(answers: list[dict[str, str]], failed: list[int]) -> CheckpointError:
    """Build the same error on every rank: the first failing rank's, and who else failed."""
    first = answers[failed[0]]
    who = f"rank {failed[0]} of {len(answers)}: " if len(answers) > 1 else ""
    others = f" (rank(s) {listed([str(r) for r in failed[1:]])} failed, too)" if failed[1:] else ""
    return error_of_kind(first["failed"], f"{who}{first['because']}{others}")
