"""Run things in forked processes that may be killed, starved of disk, or stopped at any moment."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

# How long ranks may wait for a peer that is dead: three times what their process group allows.
PATIENCE = 45
_GROUP_SECONDS = 15
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink"}


@dataclass(frozen=True)
class Ended:
    """How a process ended: `value` if it returned, else `raised` (type and words), else why."""

    how: str  # "returned", "raised", "killed", "hung"
    value: Any = None
    raised: str = ""


@dataclass
class Process:
    """A forked process that computes a JSON value."""

    pid: int
    answer: int
    seconds: float
    began: float = field(default_factory=time.monotonic)

    def join(self) -> Ended:
        """Wait for it; one that takes too long is killed."""
        data = b""
        while True:
            left = self.began + self.seconds - time.monotonic()
            if left <= 0 or not select.select([self.answer], [], [], left)[0]:
                os.kill(self.pid, signal.SIGKILL)
                self._reap()
                return Ended("hung")
            part = os.read(self.answer, 1 << 16)
            if not part:
                break
            data += part
        self._reap()
        return Ended(**json.loads(data)) if data else Ended("killed")

    def _reap(self) -> None:
        os.close(self.answer)
        os.waitpid(self.pid, 0)


def start(work: Callable[[], Any], *, seconds: float = 30) -> Process:
    """Fork, and run `work` there."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return Process(pid, ours, seconds)
    os.close(ours)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        ended = {"how": "returned", "value": work()}
    except BaseException as error:
        ended = {"how": "raised", "raised": f"{type(error).__name__}: {error}"[:400]}
    os.write(theirs, json.dumps(ended).encode())
    # No tidying up: a process group of a dead peer would wait for it.
    os._exit(0)


def run(work: Callable[[], Any], *, seconds: float = 30) -> Ended:
    """Fork, run `work` there, and wait."""
    return start(work, seconds=seconds).join()


def ranks(
    world_size: int, store: str, work: Callable[[int], Any], *, seconds: float = PATIENCE
) -> list[Ended]:
    """Run `work(rank)` in a process each, joined by a gloo process group."""

    def rank_work(rank: int) -> Any:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_GROUP_SECONDS),
        )
        return work(rank)

    started = [start(lambda r=r: rank_work(r), seconds=seconds) for r in range(world_size)]
    return [process.join() for process in started]


def at_operation(folder: str, number: int | None, action: Callable[[], None]) -> list[str]:
    """From now on call `action` before the `number`-th change of files in `folder`.

    Sees what Python code does to files, whoever wrote it: opening to write, making, renaming and
    removing, by Python's audit events, and os.fsync. Returns the list that operations are added to.
    """
    seen: list[str] = []

    def note(what: str) -> None:
        seen.append(what)
        if len(seen) == number:
            action()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and str(path).startswith(folder):
                note(f"open {os.path.basename(str(path))}")
        elif event in _CHANGES and str(arguments[0]).startswith(folder):
            note(f"{event} {os.path.basename(str(arguments[0]))}")

    sync = os.fsync

    def counted_sync(descriptor: int) -> None:
        note("fsync")
        sync(descriptor)

    sys.addaudithook(hook)
    os.fsync = counted_sync
    return seen


def die() -> None:
    """Kill -9 of this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def largest_file(nbytes: int, *, deadly: bool) -> None:
    """Writing a file beyond `nbytes` fails as on a full disk, or kills half way through."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )
