"""A pool: the workers of one world size."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vescale_comm._outcome import Outcome
from vescale_comm.testing import _worker
from vescale_comm.testing._messages import Case, Done, receive, send, unpack
from vescale_comm.testing._report import not_ended

_NAME = "vescale-comm-worker"
_START_SECONDS = 120.0
# How long the other ranks may go on once one has raised or died: mostly they wait for it forever,
# but on a busy machine they may only be late, and must not be called hung for that.
_GRACE_SECONDS = 20.0
# How long a worker may take to say where it is: at once, but for a machine that is busy.
_STACK_SECONDS = 10.0
# A gloo group has a socket to every member; a long run must not use up the file descriptors.
_MOST_GROUPS = 24
# Caches (of meshes, of layouts) may hold groups of a world that is gone. Their gloo threads spin on
# closed connections, and hundreds of them slow everything down. New workers have none.
_MOST_WORLDS = 3


class Pool:
    """Workers that run cases together, until one of them hangs or dies.

    Args:
        world_size: number of workers.
        preload: modules that are imported once, before the workers fork, where they do.
    """

    def __init__(self, world_size: int, preload: Collection[str] = ()) -> None:
        self.world_size = world_size
        self._owner = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="vescale-comm-"))
        self._fresh = False
        self._worlds = 1
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[Any] = []
        try:
            self._start(preload)
        except BaseException:
            self.kill()
            raise

    def alive(self) -> bool:
        """Return whether every worker is there to take a case, and none is worn out."""
        return self._worlds <= _MOST_WORLDS and all(p.is_alive() for p in self._processes)

    def run(self, case: Case, timeout: float) -> list[Outcome]:
        """Run a case on every rank.

        Raises:
            WorkerError: a worker hung or died; then the pool is dead and has to be replaced.
        """
        try:
            case = case.in_fresh_world() if self._fresh else case
            self._worlds += self._fresh
            for connection in self._connections:
                with contextlib.suppress(BrokenPipeError):  # who died is found and named below
                    send(connection, case)
            answers = self._collect(case.qualname, timeout, range(self.world_size))
        except BaseException:  # also an interrupt: the workers are still amid a case
            self.kill()
            raise
        for rank in range(self.world_size):
            for line in answers[rank].output.splitlines():
                print(f"[rank {rank}] {line}")
        # After a failure it is unknown what is still under way in the process groups.
        failed = any(answer.failed for answer in answers.values())
        self._fresh = failed or any(
            not 0 < answer.groups <= _MOST_GROUPS for answer in answers.values()
        )
        return [unpack(answers[rank].outcome) for rank in range(self.world_size)]

    def kill(self) -> None:
        """End the workers at once."""
        if os.getpid() != self._owner:
            return  # a fork of the test process inherits the pool, but not its children
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, preload: Collection[str]) -> None:
        context = _context(preload)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(
                target=_worker.main,
                args=(rank, self.world_size, str(self._log(rank)), theirs),
                name=f"{_NAME}-{rank}-of-{self.world_size}",
                daemon=True,
            )
            process.start()
            self._processes.append(process)
            theirs.close()
        # Rank 0 finds a port for the store; the others need it to go on.
        what = f"the start of {self.world_size} workers"
        port = self._collect(what, _START_SECONDS, [0])[0]
        for connection in self._connections[1:]:
            send(connection, port)
        self._collect(what, _START_SECONDS, range(self.world_size))

    def _collect(self, what: str, timeout: float, ranks: Collection[int]) -> dict[int, Any]:
        """Wait for one message from each rank."""
        pending = set(ranks)
        answers: dict[int, Any] = {}
        died: set[int] = set()
        deadline = time.monotonic() + timeout
        while pending and (ready := self._ready(pending, deadline - time.monotonic())):
            pending -= ready
            for rank in sorted(ready):
                try:
                    answers[rank] = receive(self._connections[rank])
                except (EOFError, OSError):
                    died.add(rank)
            if died or any(map(_failed, answers.values())):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if pending or died:
            failures = {rank: unpack(a.outcome) for rank, a in answers.items() if _failed(a)}
            stacks = {rank: self._stack(rank) for rank in sorted(pending)}
            deaths = {rank: self._death(rank) for rank in sorted(died)}
            raise not_ended(what, timeout, failures, stacks, deaths)
        return answers

    def _ready(self, ranks: set[int], seconds: float) -> set[int]:
        # A worker's end closes its connection: waiting for connections sees deaths as well.
        ready = wait([self._connections[rank] for rank in ranks], max(seconds, 0))
        return {rank for rank in ranks if self._connections[rank] in ready}

    def _death(self, rank: int) -> tuple[int | None, str]:
        self._processes[rank].join(5)
        log = self._log(rank)
        # A worker opens it when it has loaded the caller's file, which may raise before.
        text = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        return self._processes[rank].exitcode, text

    def _stack(self, rank: int) -> str:
        """Ask a worker where it is; its signal handler answers even while C++ code blocks."""
        log = self._log(rank)
        start = log.stat().st_size
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.02)
            text = log.read_bytes()[start:].decode(errors="replace")
            # The main thread comes last, and this is its outermost frame of ours.
            if "_worker.py" in text and "in main\n" in text:
                return text
        return "(it did not say where)"

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


def inside_worker() -> bool:
    """Return whether this process is itself a worker of a pool."""
    return multiprocessing.current_process().name.startswith(_NAME)


def _context(preload: Collection[str]) -> Any:
    # On Linux the workers are forked from a server process that imported torch once: a pool is
    # there in a fraction of the second that each import would take.
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_worker.__name__, *preload])
    return context


def _failed(answer: object) -> bool:
    return isinstance(answer, Done) and answer.failed
