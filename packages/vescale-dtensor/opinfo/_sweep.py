"""The parent: workers with a bound for every entry, so that a hang or a crash is a line."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTING = 180  # seconds for a worker to import what it needs, on a loaded machine

WORKER = Path(__file__).with_name("_worker.py")

Task = tuple[str, str]
"""A library (`vescale` or `stock`) and the name of an entry."""


@dataclass(frozen=True)
class Bounds:
    """What a sweep may use.

    Attributes:
        workers: processes.
        seconds: for one entry; after that it counts as hung, and its worker is replaced.
        samples: of an entry, at most.
        seed: draws samples, forms and layouts.
        program: what a worker runs.
    """

    workers: int = 2
    seconds: float = 120
    samples: int = 4
    seed: int = 0
    program: Path = WORKER


class _Worker:
    """A process, and the lines that it answers."""

    def __init__(self, bounds: Bounds) -> None:
        command = [sys.executable, bounds.program, str(bounds.samples), str(bounds.seed)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._answer("ready", STARTING)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def judged(self, task: Task, seconds: float) -> dict[str, Any]:
        """The verdict on an entry; one that hangs or crashes has that as its verdict."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(" ".join(task) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died, which its output tells
        return self._answer("verdict", seconds)

    def _answer(self, wanted: str, seconds: float) -> dict[str, Any]:
        until, at = time.monotonic() + seconds, ""
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return _ended("hung", f"no answer within {seconds:.0f} s", at)
            if line is None:
                return _ended("crashed", _exit(self._process.wait()), at)
            found = json.loads(line)
            at = found.get("at", at)
            if wanted in found:
                return found[wanted]  # type: ignore[no-any-return]

    def end(self) -> None:
        """Kill it: it may hang anywhere."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _ended(status: str, error: str, at: str) -> dict[str, Any]:
    failure = {"trial": at, "ranks": "", "kind": status, "error": error}
    return {"status": status, "trials": 0, "failed": 1, "native": {}, "fallbacks": [],
            "failures": [failure], "forms": [], "draws": False, "functions": {}}  # fmt: skip


def _exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def sweep(
    tasks: Iterable[Task], bounds: Bounds, told: Callable[[Task, dict[str, Any]], None]
) -> dict[Task, dict[str, Any]]:
    """Judge every task. `told` hears of each as it is done; its seconds are in the verdict."""
    waiting: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    found: dict[Task, dict[str, Any]] = {}
    lock = threading.Lock()
    for _ in range(bounds.workers):
        waiting.put(None)

    def work() -> None:
        worker = None
        while (task := waiting.get()) is not None:
            worker = worker or _Worker(bounds)
            began = time.monotonic()
            verdict = worker.judged(task, bounds.seconds)
            verdict |= {"name": task[1], "seconds": round(time.monotonic() - began, 1)}
            if verdict["status"] in ("hung", "crashed"):
                worker.end()
                worker = None
            with lock:
                found[task] = verdict
                told(task, verdict)
        if worker is not None:
            worker.end()

    threads = [threading.Thread(target=work) for _ in range(bounds.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
