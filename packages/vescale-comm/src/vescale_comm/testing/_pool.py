"""Pools of workers: one for each world size, started at first use, kept until the process ends."""

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import RLock
from typing import Any

from vescale_comm._errors import CommError
from vescale_comm.testing import _worker
from vescale_comm.testing._messages import Case, Done, Failed, Outcome, receive, send, unpack

_START_SECONDS = 120.0
# How long the other ranks may go on once one has raised, or died: mostly they wait for it forever.
_GRACE_SECONDS = 5.0


class WorkerError(CommError):
    """A function did not return on every rank.

    Attributes:
        failures: what was raised, by rank.
        hung: ranks that had not returned when the time was over.
        died: exit codes (negative: signals) of the workers that ended, by rank.
    """

    def __init__(
        self,
        message: str,
        failures: dict[int, Failed] | None = None,
        hung: tuple[int, ...] = (),
        died: dict[int, int | None] | None = None,
    ) -> None:
        super().__init__(message)
        self.failures = failures or {}
        self.hung = hung
        self.died = died or {}


class Pool:
    """The workers of one world size."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._owner = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="vescale-comm-"))
        self._fresh = False
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[Any] = []
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def alive(self) -> bool:
        """Whether every worker is there to take a case."""
        return all(process.is_alive() for process in self._processes)

    def run(self, case: Case, timeout: float) -> list[Outcome]:
        """Runs a case on every rank.

        Raises:
            WorkerError: a worker hung or died; then the pool is dead and has to be replaced.
        """
        try:
            case = case.in_fresh_world() if self._fresh else case
            self._fresh = True
            for connection in self._connections:
                send(connection, case)
            answers = self._collect(case.qualname, timeout)
        except BaseException:
            self.kill()
            raise
        outcomes: list[Outcome] = [unpack(answers[rank].outcome) for rank in range(self.world_size)]
        for rank in range(self.world_size):
            _show(rank, answers[rank].output)
        # Groups that a case made end with it, or a long run would use up the file descriptors; and
        # after a failure nobody knows what is still under way in the default group.
        failed = any(isinstance(outcome, Failed) for outcome in outcomes)
        self._fresh = failed or any(answer.groups != 1 for answer in answers.values())
        return outcomes

    def kill(self) -> None:
        """Ends the workers at once."""
        if os.getpid() != self._owner:
            return  # a fork of the test process inherits the pool, but not the workers
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        context = _context()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker.main,
                args=(rank, self.world_size, str(self._log(rank)), theirs),
                name=f"{_NAME}-{rank}-of-{self.world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        # Rank 0 finds a port for the store; the others need it to go on.
        port = self._collect("the start of the workers", _START_SECONDS, ranks=[0])[0]
        for connection in self._connections[1:]:
            send(connection, port)
        self._collect("the start of the workers", _START_SECONDS)

    def _collect(
        self, what: str, timeout: float, ranks: "list[int] | None" = None
    ) -> dict[int, Any]:
        """Waits for one message from each rank."""
        pending = set(range(self.world_size) if ranks is None else ranks)
        answers: dict[int, Any] = {}
        died: dict[int, int | None] = {}
        deadline = time.monotonic() + timeout
        while pending:
            ready = self._ready(pending, deadline - time.monotonic())
            if not ready:
                break
            for rank in ready:
                pending.remove(rank)
                try:
                    answers[rank] = receive(self._connections[rank])
                except (EOFError, OSError):
                    died[rank] = self._exit_code(rank)
            if died or any(_failure(answer) for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if pending or died:
            raise self._gone(what, timeout, answers, tuple(sorted(pending)), died)
        return answers

    def _ready(self, pending: set[int], seconds: float) -> list[int]:
        # A worker's end closes its connection, so waiting for the connections sees deaths, too.
        by_connection = {self._connections[rank]: rank for rank in pending}
        return [by_connection[each] for each in wait(by_connection, max(seconds, 0))]  # type: ignore[index, call-overload]

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(5)
        code: int | None = self._processes[rank].exitcode
        return code

    def _gone(
        self,
        what: str,
        timeout: float,
        answers: dict[int, Any],
        hung: tuple[int, ...],
        died: dict[int, int | None],
    ) -> WorkerError:
        failures = {rank: failed for rank in answers if (failed := _failure(answers[rank]))}
        parts = [_died(rank, code, self._tail(rank)) for rank, code in sorted(died.items())]
        parts += [section(rank, failed) for rank, failed in sorted(failures.items())]
        parts += [f"rank {rank} hung, here:\n{self._stack(rank)}" for rank in hung]
        head = f"{what} did not end on {self.world_size} ranks within {timeout:g} s"
        if died:
            head = f"{what}: " + ", ".join(f"rank {rank} died" for rank in sorted(died))
        elif failures:
            waiting = ", ".join(map(str, hung))
            head = f"{what}: rank {min(failures)} raised, and rank(s) {waiting} went on waiting"
        return WorkerError("\n\n".join([head, *parts]), failures, hung, died)

    def _stack(self, rank: int) -> str:
        log = self._log(rank)
        start = log.stat().st_size
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            time.sleep(0.05)
            with log.open() as file:
                file.seek(start)
                text = file.read()
            # faulthandler writes the main thread last.
            if "_worker.py" in text and text.endswith("\n"):
                return text
        return "(it did not say where)"

    def _tail(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace")[-4000:]

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


_NAME = "vescale-comm-worker"
_lock = RLock()
# A cache: a pool can be dropped at any time and made again.
_pools: dict[int, Pool] = {}


def outcomes_of(case: Case, world_size: int, timeout: float) -> list[Outcome]:
    """Runs a case in the pool of a world size, which is started where there is none."""
    with _lock:
        pool = _pools.get(world_size)
        if pool is None or not pool.alive():
            if pool is not None:
                _pools.pop(world_size).kill()
            pool = _pools[world_size] = Pool(world_size)
        try:
            return pool.run(case, timeout)
        except BaseException:
            _pools.pop(world_size, None)
            raise


def shutdown() -> None:
    """Ends all workers. They end with the process anyway; the next `run` starts new ones."""
    with _lock:
        while _pools:
            _pools.popitem()[1].kill()


def section(rank: int, failed: Failed) -> str:
    """Writes one rank's failure."""
    return f"rank {rank} raised {failed.type_name}: {failed.message}\n{failed.traceback}"


def inside_worker() -> bool:
    """Whether this process is itself a worker of a pool."""
    return multiprocessing.current_process().name.startswith(_NAME)


def _context() -> Any:
    # On Linux the workers are forked from a server process that imported torch once: a new pool is
    # there in a fraction of the second that each import would take.
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_worker.__name__])
    return context


def _failure(answer: object) -> Failed | None:
    outcome = unpack(answer.outcome) if isinstance(answer, Done) and answer.failed else None
    return outcome if isinstance(outcome, Failed) else None


def _died(rank: int, code: int | None, log: str) -> str:
    how = f"exit code {code}"
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            how = f"signal {signal.Signals(-code).name}"
    return f"rank {rank} died ({how}); the end of its log:\n{log}"


def _show(rank: int, output: str) -> None:
    for line in output.splitlines():
        print(f"[rank {rank}] {line}")


atexit.register(shutdown)
