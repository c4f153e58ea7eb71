"""Logs a run: JSON lines in a file, and a progress bar (or a line now and then) for people."""

import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from vescale_parallel._errors import TrainError

_LOG = logging.getLogger("vescale_parallel")


class RunLog:
    """`log.jsonl` of a run, written by rank 0 only; on other ranks every call does nothing.

    Each line is one object with an `event`: `start`, `digest`, `step`, `validation`, `checkpoint`,
    `diverged`, `memory`, `end`. Lines are flushed as they are written, so that others can follow
    the run. A number that is not finite is `null`: JSON has no NaN, and most readers refuse a file
    with one. A file that cannot be written to, as on a full disk, is told once: the run goes on.
    """

    def __init__(
        self, folder: Path, *, active: bool, append: bool = False, tensorboard: bool = False
    ) -> None:
        self._file: TextIO | None = None
        self._told = False
        self._board = _tensorboard(folder) if active and tensorboard else None
        if active:
            self._file = (folder / "log.jsonl").open("a" if append else "w")

    def write(self, event: str, **values: Any) -> None:
        """Append one line."""
        if self._file is not None:
            line = json_line({"event": event, **values})
            with self._told_if_it_fails():
                # One write for each line, so that a reader sees it complete or not at all.
                self._file.write(line)
                self._file.flush()
        if self._board is not None and event in ("step", "validation"):
            with self._told_if_it_fails():
                for name, value in values.items():
                    if isinstance(value, float):
                        self._board.add_scalar(f"{event}/{name}", value, values["step"])

    @contextmanager
    def _told_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._told:
                _LOG.warning("the run goes on without its log: %s", error)
            self._told = True

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with self._told_if_it_fails():
                self._file.close()
        if self._board is not None:
            with self._told_if_it_fails():
                self._board.close()


def json_line(value: Any) -> str:
    """Return one line of JSON that every reader accepts."""
    # `allow_nan=False` raises where a number was overlooked, instead of writing what is no JSON.
    return json.dumps(_finite(value), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Return the same value with None for every number that is infinite or NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise TrainError(
            "--tensorboard needs tensorboard: pip install 'vescale-parallel[train]'"
        ) from error
    return SummaryWriter(str(folder))


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log; one that is still being written is left out."""
    # Read while another process writes: a run that has not begun has no file yet.
    if not path.exists():
        return []
    # The last part has no end of line: it is empty, or still being written.
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


class Progress:
    """Steps, loss and tokens/s: a bar on a terminal, else a line for every tenth of the run."""

    def __init__(self, first: int, last: int, tokens_per_step: int, *, active: bool) -> None:
        self._tokens_per_step, self._first, self._last = tokens_per_step, first, last
        self._every = max(1, (last - first) // 10)
        # Ten steps: the first ones, which make tables and plans, are soon forgotten.
        self._times = deque([time.perf_counter()], maxlen=11)
        self._active = active
        self._bar = terminal_bar("training", last, first) if active else None

    def step(self, step: int, loss: float) -> float:
        """Report a finished step; returns its tokens per second."""
        self._times.append(time.perf_counter())
        rate = self._tokens_per_step / (self._times[-1] - self._times[-2])
        spent = self._times[-1] - self._times[0]
        average = self._tokens_per_step * (len(self._times) - 1) / spent
        if self._bar is not None:
            self._bar.update(step, loss, average)
        elif self._active and ((step - self._first) % self._every == 0 or step == self._last):
            print(f"step {step:5d}  loss {loss:.4f}  {average:,.0f} tokens/s", flush=True)
        return rate

    def note(self, text: str) -> None:
        """Say something without breaking the bar."""
        if self._bar is not None:
            self._bar.note(text)
        elif self._active:
            print(text, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        # Also after an error: a bar that is drawn on hides the cursor and the message.
        if self._bar is not None:
            self._bar.close()


class Bar:
    """A progress bar of steps on a terminal, with loss and tokens/s beside it."""

    def __init__(self, title: str, last: int, first: int) -> None:
        # Imported here: the package without its `train` extra has no rich.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._progress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(title, total=last, completed=first, facts="")
        self._progress.start()

    def update(self, step: int, loss: float, rate: float) -> None:
        """Show a finished step."""
        facts = f"loss {loss:.4f}  {rate:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, facts=facts)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Stop drawing."""
        self._progress.stop()


def terminal_bar(title: str, last: int, first: int = 0) -> Bar | None:
    """Return a bar where there is a terminal to draw it on, and rich to draw it with."""
    if not sys.stderr.isatty():
        return None
    try:
        return Bar(title, last, first)
    except ImportError:
        return None
