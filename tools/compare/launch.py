"""Start the trainer as child processes, follow its log, and end what was started."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vescale_parallel import TrainError
from vescale_parallel.train.log import read_log

_POLL_SECONDS: Final = 0.2
_GRACE_SECONDS: Final = 15.0

# Waiting threads that spin keep the others from working where ranks share cores; measured on two
# busy cores: 300 tokens/s with spinning, 1900 without. (The trainer sets its number of threads.)
_ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}

# The trainer's own line, or the last line of a traceback; either may start with a rank.
_SAYS_WHAT_IS_WRONG: Final = re.compile(r"(\[rank ?\d+\]:? )?(error: |[\w.]+(Error|Exception): )")


@dataclass(frozen=True)
class Launch:
    """One run of the trainer.

    Attributes:
        title: what tables and curves call it.
        folder: where its log, output and checkpoints go.
        processes: how many ranks.
        arguments: the trainer's options, without `--out`.
    """

    title: str
    folder: Path
    processes: int
    arguments: tuple[str, ...]

    def command(self) -> list[str]:
        """The command line: plain Python for one process, torchrun for several."""
        program = ["-m", "vescale_parallel.train", *self.arguments, "--out", str(self.folder)]
        if self.processes == 1:
            return [sys.executable, *program]
        count = str(self.processes)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
        return [sys.executable, *launcher, *program]


def follow(
    launch: Launch, seconds: float, on_events: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Run to the end and return the log; `on_events` sees all events so far, again and again.

    Raises:
        TrainError: the run failed, with the end of what it said, or took longer than `seconds`.
    """
    launch.folder.mkdir(parents=True, exist_ok=True)
    log = launch.folder / "log.jsonl"
    # The log of an earlier run in this folder would be read as this one's.
    log.unlink(missing_ok=True)
    output = launch.folder / "output.txt"
    deadline = time.monotonic() + seconds
    with output.open("w") as said:
        # Its own session: signals meant for this program, and ours for the child, go no further.
        process = subprocess.Popen(
            launch.command(),
            stdout=said,
            stderr=subprocess.STDOUT,
            env=os.environ | _ENVIRONMENT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise TrainError(f"{launch.title}: not done after {seconds:.0f} s; ended.")
                on_events(read_log(log))
                time.sleep(_POLL_SECONDS)
        finally:
            _end(process)
    if process.returncode != 0:
        raise TrainError(_failure(launch, process.returncode, output))
    events = read_log(log)
    on_events(events)
    return events


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child that is still running: first by asking, so that torchrun ends its ranks."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        # The child leads its own session, so this reaches nothing that we did not start.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(launch: Launch, status: int, output: Path) -> str:
    """The lines in which ranks say what is wrong, or else the last ones."""
    lines = output.read_text(errors="replace").splitlines()
    told = [line for line in lines if _SAYS_WHAT_IS_WRONG.match(line)] or lines
    return "\n".join([f"{launch.title}: ended with status {status} ({output})", *told[-8:]])
