"""Coordinators over torch process groups, and over gloo groups for the background."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vescale_ckpt._coordination.bounded_store import BoundedStore
from vescale_ckpt._coordination.coordinator import Coordinator, SingleProcess, nothing
from vescale_ckpt._coordination.meeting import LONGEST_DEFAULT, Call, Store, arrive, refuse
from vescale_ckpt._coordination.torch_groups import (
    gloo_group,
    prefixed,
    store_of,
    timeout_of,
    which_start,
)
from vescale_ckpt._errors import CoordinationError

_LENGTH_BYTES = 8
# Bytes of a message that go with its length, in the first collective: this many over all ranks, and
# at least so many of each.
_FIRST_BYTES = 64 << 10
_SHORT_BYTES = 256


def world_of_now() -> dist.ProcessGroup | None:
    """Return the default group; None where there is none. After a new init it is another one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def coordinator_of(group: dist.ProcessGroup | None) -> Coordinator:
    """Return the ranks of `group`, or of the default group, or this process alone."""
    if group is not None or world_of_now() is not None:
        return GroupCoordinator(group)
    return SingleProcess()


class _GatherCoordinator(ABC):
    """Ranks that exchange messages by all_gather."""

    rank: int
    world_size: int
    device = torch.device("cpu")

    @abstractmethod
    def all_gather(self, every: list[torch.Tensor], own: torch.Tensor) -> None:
        """Gather the tensors of all ranks, as `torch.distributed.all_gather` does."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Run one collective, and a second one for what of long messages is left."""
        with self._lost():
            return self._exchange(message)

    @contextmanager
    def _lost(self) -> Iterator[None]:
        # torch reports a peer that died, and a timeout, as RuntimeError. The collective may have
        # been left half done: nothing more can be agreed on over this group.
        try:
            yield
        except RuntimeError as error:
            raise CoordinationError(
                f"rank {self.rank} lost the other ranks (one died, or left the call): {error}"
            ) from error

    @property
    def _first_bytes(self) -> int:
        # Every collective makes each rank wait for the slowest, so short messages go together with
        # the lengths. How many bytes that are has to follow from what all ranks know.
        return _LENGTH_BYTES + max(_SHORT_BYTES, _FIRST_BYTES // self.world_size)

    def _beginning(self, message: bytes) -> bytes:
        length = len(message).to_bytes(_LENGTH_BYTES, "little")
        return (length + message)[: self._first_bytes]

    def _exchange(self, message: bytes) -> list[bytes]:
        begun = self._gather(self._beginning(message), self._first_bytes)
        # From what was gathered, so equal on all ranks: all of them run the second collective, or
        # none.
        longest = max(map(_size, begun))
        room = self._first_bytes - _LENGTH_BYTES
        if longest > room:
            rest = self._gather(message[room:], longest - room)
            begun = [a + b for a, b in zip(begun, rest, strict=True)]
        return list(map(_message, begun))

    def _gather(self, message: bytes, nbytes: int) -> list[bytes]:
        # Bytes in uint8 tensors, not object collectives: those unpickle what they receive.
        padded = bytearray(message.ljust(nbytes, b"\0"))
        # Padded to one size: all_gather takes equal shapes of all ranks.
        own = torch.frombuffer(padded, dtype=torch.uint8).to(self.device)
        every = [torch.empty_like(own) for _ in range(self.world_size)]
        self.all_gather(every, own)
        return [data.cpu().numpy().tobytes() for data in every]


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where messages are sent from: the host, unless the group has no backend for it."""
    # As text, "cpu:gloo,cuda:nccl": a group over NCCL alone may have been made as "cuda:nccl", too.
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


class GroupCoordinator(_GatherCoordinator):
    """The ranks of a torch process group; `None` is the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        # Bound here, also the default group: after `destroy_process_group` and a new
        # `init_process_group` that is another one, perhaps with other ranks.
        chosen = group if group is not None else world_of_now()
        assert chosen is not None
        self.group = chosen
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        if self.rank < 0:
            raise CoordinationError("this process is not a member of the group that was given")
        self.device = _message_device(self.group)

    def __eq__(self, other: object) -> bool:
        """Compare the groups of ranks; a group made anew is another one."""
        return isinstance(other, GroupCoordinator) and self.group is other.group

    __hash__ = None  # type: ignore[assignment]

    def all_gather(self, every: list[torch.Tensor], own: torch.Tensor) -> None:
        """Gather over the group."""
        dist.all_gather(every, own, group=self.group)

    def meet(self, call: Call) -> Callable[[], None]:
        """Meet in the store of the group, where there is one that can be polled."""
        store = self._store()
        # The same on all ranks of a group: they then go straight to the first collective.
        if store is None:
            return nothing
        if call.timeout is None:
            own = timeout_of(self.group, self.device)
            call = call._replace(timeout=None if own is None else min(own, LONGEST_DEFAULT))
        with self._lost():
            wait = arrive(store, self.rank, self.world_size, call)

        def met() -> None:
            with self._lost():
                wait()

        return met

    def refuse(self, call: Call, error: Exception) -> None:
        """Tell it in the store of the group."""
        store = self._store()
        if store is None:
            return
        with self._lost():
            refuse(store, self.rank, self.world_size, call, error)

    def _store(self) -> Store | None:
        # Prefixed, so that no key of ours can be one of torch's or of the user's.
        store = store_of(self.group) if self.world_size > 1 else None
        if store is None:
            return None
        return BoundedStore(prefixed(f"vescale-ckpt{which_start()}", store))

    def background(self) -> Coordinator:
        """Make a gloo group: collectives of two threads on one group would get mixed up."""
        store = store_of(self.group)
        if store is None:
            raise CoordinationError(
                "torch does not tell the store of this process group, through which a gloo group "
                "for the background would be made: use save instead of async_save"
            )
        # Rank 0's random name, which all get by an exchange. New for each group: a store keeps the
        # addresses that an earlier group has left there, and this one would connect to them.
        name = self.exchange(secrets.token_hex(8).encode())[0].decode()
        store = prefixed(f"vescale-ckpt/gloo-{name}", store)
        return _BackgroundCoordinator(gloo_group(store, self.rank, self.world_size))


class _BackgroundCoordinator(_GatherCoordinator):
    """The same ranks through a gloo group of their own, which only one thread of each uses."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.world_size = group, group.rank(), group.size()

    def all_gather(self, every: list[torch.Tensor], own: torch.Tensor) -> None:
        """Gather over the group."""
        # Waited for here: gloo works in threads of its own, and the buffers belong to this call.
        self.group.allgather([every], [own]).wait()

    def meet(self, call: Call) -> Callable[[], None]:
        """Return a wait that ends at once: the ranks have met in the foreground."""
        return nothing

    def refuse(self, call: Call, error: Exception) -> None:
        """Do nothing: failures here are reported by `exchange`."""

    def background(self) -> Coordinator:
        """Return itself: this is the background."""
        return self


def _size(gathered: bytes) -> int:
    return int.from_bytes(gathered[:_LENGTH_BYTES], "little")


def _message(gathered: bytes) -> bytes:
    return gathered[_LENGTH_BYTES : _LENGTH_BYTES + _size(gathered)]
