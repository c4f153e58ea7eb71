"""The watcher of the world that this process is in now."""

import atexit
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from vescale_comm._errors import CommError, RankFailedError
from vescale_comm._torch.compat import shared_store_of
from vescale_comm._torch.launcher import keeps_its_store
from vescale_comm._watchdog.channel import Answer, Channel, Ending
from vescale_comm._watchdog.comparison import Comparison
from vescale_comm._watchdog.execution_log import ExecutionLog, WatchedGroup, WorldLogs
from vescale_comm._watchdog.places import is_users
from vescale_comm._watchdog.process_exit import end_process
from vescale_comm._watchdog.report import is_lost_connection, is_timeout
from vescale_comm._watchdog.watcher import Watcher

_LOG = logging.getLogger("vescale_comm")
_lock = threading.Lock()
# How long a rank that ends waits for one of its threads that still compares its last steps.
_RETIRE_SECONDS = 30.0


class _Current:
    """What is watched now: one world, and the process that started to watch it."""

    def __init__(self) -> None:
        self.world: weakref.ref[ProcessGroup] | None = None
        self.process = -1
        self.watcher: Watcher | None = None
        self.registered = -1  # the process whose exit functions are there
        # Of worlds that have ended, with nobody to raise it to.
        self.untold: str | None = None
        # Held by who ends what watches a world. Of this process alone: a fork may copy a held one.
        self.retiring = threading.RLock()


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
            _retire(_current.watcher, os.getpid(), None)
        if _current.process != os.getpid():
            _current.retiring = threading.RLock()
        _current.world, _current.process = weakref.ref(world), os.getpid()
        _current.watcher = _made(world, *shared)
        if _current.watcher is not None:
            # A world that is destroyed ends when the last of its steps have been compared; its
            # store is held until then, and not beyond.
            ends = weakref.finalize(world, _retire, _current.watcher, os.getpid(), shared[0])
            ends.atexit = False
        if _current.registered != os.getpid():
            _register_exits()


def _register_exits() -> None:
    _current.registered = os.getpid()
    # From Python 3.13 on multiprocessing starts a forked process without the exit functions of its
    # parent, which imported this module: there they are registered again, in the same order.
    functions = (_leave,) if os.getpid() == _IMPORTED else (_fail, _leave)
    for function in functions:
        atexit.unregister(function)
        atexit.register(function)


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
        None where nothing is compared: one rank, or a world without a shared store.
    """
    own = own_logs()
    if own is not None:
        return own.log(tuple(ranks), name) if len(ranks) > 1 else None
    start()
    watcher = current()
    if watcher is None or watcher.comparison is None or len(ranks) < 2:
        return None
    return watcher.comparison.log(tuple(ranks), name)


def forget_executed() -> None:
    """Begin to compare anew: for tests that share a world, each from the same point on."""
    # Also on a rank that has executed nothing so far: ranks count how often they began anew, and
    # those that have not begun alike would wait in vain for each other's words.
    own = own_logs()
    if own is not None:
        own.forget()
        return
    start()
    watcher = current()
    if watcher is not None and watcher.comparison is not None:
        watcher.comparison.reset()


def compare_anew() -> None:
    """Compare what ranks execute from here on: up to here it may differ, as all of them know.

    For a failure of some ranks that all have heard of, and after which all go on. Every rank of the
    world calls this at the same point. A difference that was found before is raised as ever.
    """
    watcher = current()
    comparison = None if watcher is None else watcher.comparison
    if comparison is None or comparison.trouble is None:
        forget_executed()


def own_logs() -> WorldLogs | None:
    """Return what compares logs where the world does so itself, as a simulation does."""
    world: object = dist.group.WORLD if dist.is_initialized() else None
    return world.logs if isinstance(world, WatchedGroup) else None


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
    agent = keeps_its_store()
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


def _retire(watcher: Watcher, process: int, store: Store | None) -> None:
    """End what watches a world that was destroyed. `store`: of it, which has to outlive this."""
    if process != os.getpid():
        return
    # Whichever thread lets go of a world last runs this, also one that works beside the program,
    # which would then end without the verdict: whoever comes second waits until the first is done.
    # Reentrant, for a collection of garbage in here may end another world.
    alone = _current.retiring.acquire(timeout=_RETIRE_SECONDS)
    try:
        watcher.retire()
        _current.untold = watcher.untold() or _current.untold
    finally:
        if alone:
            _current.retiring.release()


def _leave() -> None:
    # Set by the interpreter when it prints what ended the program; no hook is replaced.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    watcher = current()
    if hint := says_of_restarts(error):
        _LOG.error("%s", hint)
    if watcher is not None:
        watcher.close(_explained(watcher, error))
        if error is None:
            _current.untold = watcher.untold() or _current.untold
    elif _current.watcher is not None and _current.process == os.getpid():
        # A program that has taken its process groups down has said goodbye, unless it then failed.
        _retire(_current.watcher, _current.process, None)
        if error is not None:
            _current.watcher.close(ending_of(error))


def says_of_restarts(error: BaseException | None) -> str:
    """Say what is behind a group that ranks could not make after a restart; empty if nothing is."""
    again = keeps_its_store() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not again or "connectFullMesh" not in str(error):
        return ""
    return (
        "after a restart gloo looked for a rank where it listened before: torchrun's store keeps "
        "the addresses of earlier starts. Make the process group by vescale_comm.init_process_group"
    )


def _explained(watcher: Watcher, error: BaseException | None) -> Ending:
    """Describe how this rank ends; where a call of torch's own failed, say what the others did."""
    ending = ending_of(error)
    if isinstance(error, CommError) or not isinstance(error, RuntimeError):
        return ending
    ended, late = is_lost_connection(str(error)), is_timeout(str(error))
    if not ended and not late:
        return ending
    found, state = watcher.explain(Answer(ending.text), ended=ended)
    if found:
        _LOG.error("%s; the other ranks:\n%s", ending.text, found)
    return replace(ending, consequence=state.explains())


def _fail() -> None:
    """End this process as one that failed, if its ranks differed and no exception could say so."""
    if _current.process != os.getpid():
        return
    if _current.retiring.acquire(timeout=_RETIRE_SECONDS):  # another thread may be finding out
        _current.retiring.release()
    if _current.untold is None:
        return
    # Python ends with what the program returned, whatever is raised from here on. What is left to
    # be done at exit was registered before this module was imported: by torch and by logging.
    end_process(f"vescale_comm.CommMismatchError: {_current.untold}")


_IMPORTED = os.getpid()
# First of all of this package, so that it is called after what the program registers.
atexit.register(_fail)
