"""The world of processes that a launcher started, without what earlier starts left in its store.

torchrun's agent serves one store to every start of its workers, and torch gives each start the same
keys: after a restart gloo may read where a peer listened before, and meets nobody there.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from vescale_comm._errors import CommTimeoutError
from vescale_comm._groups.bound_waits import DEFAULT_TIMEOUT
from vescale_comm._torch.launcher import keeps_its_store
from vescale_comm._torch.ranks import named
from vescale_comm._watchdog.bounded_store import (
    ANSWER_SECONDS,
    BoundedStore,
    StoreLostError,
    connected,
    in_time,
)

# Between two looks at who has come, at first and in the long run, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
# The server of the store has to answer all ranks.
_RANKS_PER_SECOND = 2000


def init_process_group(
    backend: str | None = None, *, timeout: timedelta | None = None, **options: Any
) -> None:
    """Make the default process group as torch's function does, also after a restart. Collective.

    A launcher such as torchrun starts all processes again when one has failed, and they meet in the
    store that it has kept. torch gives all starts the same keys there; here each start has its own.
    Elsewhere, and where `store` or `init_method` is given, this is torch's function.

    Args:
        backend: as torch's, such as `"gloo"` or `"cpu:gloo,cuda:nccl"`.
        timeout: of collectives, and for the others to come; by default torch's, and ten minutes.
        options: further ones of torch's.

    Raises:
        CommTimeoutError: some rank does not come in time. Rank 0 names those that have not.

    Examples:
        vescale_comm.init_process_group("gloo")  # under `torchrun --max-restarts 3 train.py`
    """
    given = dist.is_initialized() or {"store", "init_method"} & options.keys()
    if keeps_its_store() and not given:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        rank, size = options.pop("rank", rank), options.pop("world_size", size)
        seconds = DEFAULT_TIMEOUT if timeout is None else timeout.total_seconds()
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        options |= {"store": _launchers_store(address, rank, size, seconds)}
        options |= {"rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timeout, **options)


def _launchers_store(address: tuple[str, int], rank: int, size: int, seconds: float) -> Store:
    def joined() -> TCPStore:
        return TCPStore(*address, is_master=False, timeout=timedelta(seconds=seconds))

    try:
        return world_store(in_time(joined, seconds + ANSWER_SECONDS), rank, size, seconds)
    except StoreLostError as error:
        raise CommTimeoutError(
            f"init_process_group: rank {rank} of {size} does not reach the store: {error}"
        ) from error


def world_store(store: Store, rank: int, size: int, seconds: float) -> Store:
    """Return a part of a store that `size` processes share, and none before them has written to.

    Each draws a number that nobody had. That of rank 0 names the part: it answers every number that
    is not answered, those of dead processes, too, until all ranks have said that they know.

    Raises:
        CommTimeoutError: some rank does not come within `seconds`.
        StoreLostError: the store does not answer.
    """
    words = connected(store, "vescale_comm/worlds")
    patience = _Patience(rank, size, seconds)
    drawn = words.add("drawn", 1)
    ask = _answer_all if rank == 0 else _asked
    return PrefixStore(f"vescale_comm/world/{ask(words, drawn, patience)}", store)


class _Patience:
    """Waits a little longer each time, and not beyond a deadline."""

    def __init__(self, rank: int, size: int, seconds: float) -> None:
        self.rank, self.size, self.seconds = rank, size, seconds
        self._deadline, self._pause = time.monotonic() + seconds, _FIRST_PAUSE
        self._longest = max(_LONGEST_PAUSE, size / _RANKS_PER_SECOND)

    def sleep(self, missing: Callable[[], str]) -> None:
        if time.monotonic() > self._deadline:
            raise CommTimeoutError(
                f"init_process_group: rank {self.rank} of {self.size} has waited {self.seconds:g} "
                f"s for {missing()}: look there at what comes before the process group"
            )
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, self._longest)


def _asked(words: BoundedStore, drawn: int, patience: _Patience) -> str:
    while (answer := words.get(f"answer/{drawn}")) is None:
        patience.sleep(lambda: "rank 0")
    world = answer.decode()
    # Before it is counted: who sees the count finds the name.
    words.set(f"{world}/{patience.rank}", "")
    words.add(f"{world}/came", 1)
    return world


def _answer_all(words: BoundedStore, drawn: int, patience: _Patience) -> str:
    world, others = str(drawn), range(1, patience.size)
    answered = before = words.add("answered", 0)
    while words.add(f"{world}/came", 0) < len(others):
        for number in range(answered + 1, (last := words.add("drawn", 0)) + 1):
            words.set(f"answer/{number}", world)
        answered = last
        patience.sleep(lambda: named([r for r in others if not words.check(f"{world}/{r}")]))
    words.add("answered", answered - before)
    return world
