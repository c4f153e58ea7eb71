"""The world of processes that a launcher started, without what earlier starts left in its store.

torchrun's agent serves one store to every start of its workers, and torch gives each start the same
keys: after a restart gloo may read where a peer listened before, and meets nobody there.
"""

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from vescale_comm._errors import CommTimeoutError
from vescale_comm._groups.bound_waits import DEFAULT_TIMEOUT
from vescale_comm._torch.launcher import keeps_its_store
from vescale_comm._torch.ranks import named

# Between two looks at who has come, at first and in the long run, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


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
    if keeps_its_store() and not {"store", "init_method"} & options.keys():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        rank, size = options.pop("rank", rank), options.pop("world_size", size)
        seconds = DEFAULT_TIMEOUT if timeout is None else timeout.total_seconds()
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=seconds))
        options |= {"store": world_store(store, rank, size, seconds)}
        options |= {"rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timeout, **options)


def world_store(store: Store, rank: int, size: int, seconds: float) -> Store:
    """Return a part of a store that `size` processes share, and none before them has written to.

    Each draws a number that nobody had. That of rank 0 names the part: it answers every number that
    is not answered, those of dead processes, too, until all ranks have said that they know.

    Raises:
        CommTimeoutError: some rank does not come within `seconds`.
    """
    words = PrefixStore("vescale_comm/worlds", store)
    drawn = words.add("drawn", 1)
    if rank == 0:
        world = str(drawn)
        _answer_all(words, world, size, seconds)
    else:
        world = _asked(words, drawn, rank, size, seconds)
    return PrefixStore(f"vescale_comm/world/{world}", store)


def _asked(words: Store, drawn: int, rank: int, size: int, seconds: float) -> str:
    answer = f"answer/{drawn}"
    try:
        words.wait([answer], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise CommTimeoutError(
            f"init_process_group: rank {rank} of {size} has waited {seconds:g} s for rank 0, which "
            "did not come. Look at what rank 0 does before it makes the group"
        ) from error
    world: str = words.get(answer).decode()
    # Before it is counted: who sees the count finds the name.
    words.set(f"{world}/{rank}", "")
    words.add(f"{world}/came", 1)
    return world


def _answer_all(words: Store, world: str, size: int, seconds: float) -> None:
    answered = before = words.add("answered", 0)
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while words.add(f"{world}/came", 0) < size - 1:
        if time.monotonic() > deadline:
            raise CommTimeoutError(_missing(words, world, size, seconds))
        drawn = words.add("drawn", 0)
        for number in range(answered + 1, drawn + 1):
            words.set(f"answer/{number}", world)
        answered = drawn
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    words.add("answered", answered - before)


def _missing(words: Store, world: str, size: int, seconds: float) -> str:
    missing = [rank for rank in range(1, size) if not words.check([f"{world}/{rank}"])]
    return (
        f"init_process_group: rank 0 of {size} has waited {seconds:g} s for {named(missing)}, "
        "which did not come. Look at what they do before they make the group"
    )
