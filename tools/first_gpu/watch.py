"""Start a section's process, and see to it that it comes to an end.

A case that takes too long is asked for its stacks and ended; one that dies is named. The section
goes on behind it, in a new process, as long as there is time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from tools.first_gpu import findings
from tools.first_gpu.catalogue import Section
from tools.first_gpu.child import START_ANEW
from tools.first_gpu.findings import Finding, append, latest, read
from tools.first_gpu.options import Options
from tools.first_gpu.paths import environment, of_checkout
from tools.packages import ROOT

_LOOK: Final = 0.1
_STARTS: Final = 6
"""Processes of one section at most: where each dies, there is nothing more to learn."""

_WORTH: Final = 3.0
"""Seconds without which no process is started: it imports torch first."""

_START_PATIENCE: Final = 60.0
"""Seconds more than a case's that imports, and the first call of the device, may take."""

START: Final = "(start)"
"""The case that stands for what comes before the first."""

_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)(?: in (\S+))?')


@dataclass
class Watch:
    """One section while it runs.

    Attributes:
        section: which.
        options: what was asked for.
        file: where findings go.
        log: where its processes' output goes.
        until: when it begins no more cases, by the monotonic clock.
        end: when all ends.
        stop: set when somebody has interrupted it.
    """

    section: Section
    options: Options
    file: Path
    log: Path
    until: float
    end: float
    stop: threading.Event
    _asked: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Run the section, in as many processes as it takes."""
        for _ in range(_STARTS):
            left = self.until - time.monotonic()
            if self.stop.is_set() or (left < _WORTH and self._asked):
                break
            before = self._asked
            if self._run_once(left) or self._asked == before:
                break
        self._note_what_was_not_reached()

    def _run_once(self, seconds: float) -> bool:
        """Run one process; return whether it came to its end by itself."""
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = self._start(seconds, output)
            begun_at, current = time.monotonic(), START
            hung = ended = False
            while process.poll() is None:
                time.sleep(_LOOK)
                now, (running, patience) = time.monotonic(), self._running()
                if running != current:
                    begun_at, current = now, running
                limit = self.options.case_limit + patience
                hung, ended = now - begun_at > limit, now > self.end
                ended = ended or self.stop.is_set()
                if hung or ended:
                    _end(process)
                    break
            self._conclude(process.wait(), hung, ended, time.monotonic() - begun_at, output)
        self._asked = {one.case for one in self._found()}
        return process.returncode == 0 or ended

    def _start(self, seconds: float, output: IO[str]) -> subprocess.Popen[bytes]:
        options = self.options
        command = [sys.executable, "-m", "tools.first_gpu.child", self.section.name]
        # No time may be left: a number below zero would read as an option.
        command += ["--device", options.device, f"--seconds={max(0.0, seconds):.3f}"]
        command += ["--case", options.case]
        command += ["--file", str(self.file.resolve()), "--asked", json.dumps(sorted(self._asked))]
        command += [f"--first={file}" for file in options.first]
        interpreted = self.section.interpreted and not options.cuda
        env = environment(os.environ, cuda=options.cuda, interpreted=interpreted)
        return subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip

    def _found(self) -> list[Finding]:
        return [one for one in latest(read(self.file)) if one.section == self.section.name]

    def _running(self) -> tuple[str, float]:
        """The case that runs, and how much longer than others it may take."""
        for one in self._found():
            if one.status == findings.BEGUN:
                return one.case, one.seconds
        return START, _START_PATIENCE

    def _conclude(
        self, status: int, hung: bool, ended: bool, seconds: float, output: IO[str]
    ) -> None:
        """Keep what the process printed, and write down what became of the case that ran."""
        output.seek(0)
        said = output.read()
        if said.strip():
            with self.log.open("a") as log:
                log.write(f"=== {self.section.name}\n{said}\n")
        if status == 0 or (status == START_ANEW and self._running()[0] == START):
            return
        stack = _stack(said)
        where, more = _innermost(stack), "\n".join(stack)
        if hung:
            found, got = findings.HUNG, f"nothing for {seconds:.0f} s"
        elif ended:
            found, got = findings.UNFINISHED, f"the time was up {seconds:.0f} s after it had begun"
        else:
            found, got = findings.DIED, _death(status)
            where, more = where or _last_line(said), more or said[-4000:]
        case, _ = self._running()
        append(
            self.file,
            Finding(
                section=self.section.name, case=case, status=found, expected="that it ends",
                got=got, seconds=seconds, where=where, more=more,
            ),
        )  # fmt: skip

    def _note_what_was_not_reached(self) -> None:
        """Say so where a process ended before it could list its cases."""
        if not self._found():
            only = "*" if self.options.case == "*" else self.options.case
            status = findings.NOT_REACHED
            got = f"no case is called {only}" if only != "*" else ""
            append(
                self.file, Finding(section=self.section.name, case="(all)", status=status, got=got)
            )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask for the stacks of all threads, and end the process with what it has started."""
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def _death(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"died by {signal.Signals(-status).name}"
    except ValueError:
        return f"died by signal {-status}"


def _stack(said: str) -> list[str]:
    """The stacks that the interpreter printed last, of a crash or when asked."""
    lines = said.split("\n")
    marks = ("Fatal Python error", "Thread 0x", "Current thread 0x")
    starts = [at for at, line in enumerate(lines) if line.startswith(marks)]
    return lines[starts[0] : starts[0] + 200] if starts else []


def _innermost(stack: list[str]) -> str:
    """The innermost line of a package in the stacks; else that of a section."""
    frames = [match.groups() for line in stack if (match := _FRAME.search(line))]
    for part in ("packages", "sections", ""):
        for file, line, _ in frames:
            path = of_checkout(file)
            if path and (not part or part in path.parts):
                return f"{path}:{line}"
    return f"{frames[0][0]}:{frames[0][1]}" if frames else ""


def _last_line(said: str) -> str:
    lines = [line for line in said.split("\n") if line.strip()]
    return lines[-1][:200] if lines else ""
