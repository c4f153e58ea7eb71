"""The watcher of the world that this process is in now."""

import atexit
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from vescale_comm._errors import RankFailedError
from vescale_comm._torch.compat import shared_store_of
from vescale_comm._watchdog.channel import Channel, Ending
from vescale_comm._watchdog.comparison import Comparison
from vescale_comm._watchdog.execution_log import ExecutionLog
from vescale_comm._watchdog.places import is_users
from vescale_comm._watchdog.watcher import Watcher

_lock = threading.Lock()


class _Current:
    """What is watched now: one world, and the process that started to watch it."""

    def __init__(self) -> None:
        self.world: weakref.ref[ProcessGroup] | None = None
        self.process = -1
        self.watcher: Watcher | None = None
        self.registered = False


_current = _Current()


def start() -> None:
    """Watch the default process group, if that is not being done.

    Groups that one process simulates, and those of one rank, are not: nobody waits there.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or _is_watched(world):
        return
    shared = shared_store_of(world)
    if shared is None or world.size() == 1:
        return
    with _lock:
        if _is_watched(world):
            return
        if _current.watcher is not None and _current.process == os.getpid():
            _current.watcher.retire()
        _current.world, _current.process = weakref.ref(world), os.getpid()
        _current.watcher = _made(world, *shared)
        if not _current.registered:
            _current.registered = True
            atexit.register(_leave)


def current() -> Watcher | None:
    """Return the watcher of the current world; None if there is none."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return _current.watcher if world is not None and _is_watched(world) else None


def execution_log(ranks: Sequence[int], name: str = "") -> ExecutionLog | None:
    """Return what these ranks of the current world execute together, to be added to.

    Args:
        ranks: global ranks, of which this one is, in the same order on each of them.
        name: tells apart what these ranks execute in no common order, as in several threads.

    Returns:
        None where nothing is compared: one rank, a simulation, or a world without a shared store.
    """
    start()
    watcher = current()
    if watcher is None or watcher.comparison is None or len(ranks) < 2:
        return None
    return watcher.comparison.log(tuple(ranks), name)


def forget_executed() -> None:
    """Begin to compare anew: for tests that share a world, each from the same point on."""
    watcher = current()
    if watcher is not None and watcher.comparison is not None:
        watcher.comparison.reset()


def ending_of(error: BaseException | None) -> Ending:
    """Describe the end of a rank that raised `error`, or nothing."""
    if error is None:
        return Ending("reached the end of its program", raised=False)
    text = traceback.format_exception_only(error)[-1].strip()
    return Ending(f"raised {text}{_where(error)}", consequence=isinstance(error, RankFailedError))


def _where(error: BaseException) -> str:
    # The innermost line that the user wrote: where it was raised in a library says less.
    users = [each for each in traceback.walk_tb(error.__traceback__) if is_users(each[0])]
    if not users:
        return ""
    frame, line = users[-1]
    return f", at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


def _is_watched(world: ProcessGroup) -> bool:
    # Threads do not survive a fork: a child that joins a world of its own starts anew.
    known = _current.world
    return known is not None and known() is world and _current.process == os.getpid()


def _made(world: ProcessGroup, store: Store, kind: str) -> Watcher | None:
    # torchrun's agent serves the store for its workers, and outlives them.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Weakly: the thread must not keep the sockets of a world that was destroyed.
    reference = weakref.ref(world)
    try:
        channel = Channel(store, dist.get_rank(), world.size())
        server = 0 if kind == "TCPStore" and not agent else None
        comparison = None
        if kind == "TCPStore":  # a file would grow with every word that is said
            comparison = Comparison(
                store,
                dist.get_rank(),
                world.size(),
                lambda: _is_default(reference),
                channel.has_ended,
            )
        watcher = Watcher(
            channel, server=server, active=lambda: _is_default(reference), comparison=comparison
        )
        watcher.start()
    except RuntimeError:  # without it a collective works as well, and says less when it fails
        return None
    return watcher


def _is_default(world: weakref.ref[ProcessGroup]) -> bool:
    return dist.is_initialized() and dist.group.WORLD is world()


def _leave() -> None:
    watcher = current()
    if watcher is None:
        # A program that has taken its process groups down has said goodbye already.
        if _current.watcher is not None and _current.process == os.getpid():
            _current.watcher.retire()
    else:
        # Set by the interpreter when it prints what ended the program; no hook is replaced.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        watcher.close(ending_of(error))
