"""Progress of a child process, read from its log."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vescale_parallel.train.log import terminal_bar

_PARTS: Final = 4
"""Where there is no terminal, a line is printed after each of this many parts of a run."""


class Display:
    """A bar on a terminal, a line now and then elsewhere, and one line at the end."""

    def __init__(self, title: str, processes: int, first: int, last: int) -> None:
        self._title = f"{title} ({processes} process{'es' if processes > 1 else ''})"
        self._bar = terminal_bar(self._title, last, first)
        self._first, self._length = first, last - first
        self._parts_told = 0
        self._newest: Mapping[str, Any] | None = None
        self._rate = 0.0
        self._started = time.perf_counter()

    def __enter__(self) -> "Display":
        return self

    def show(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Show the newest step of a log; called with all its events so far."""
        steps = [event for event in events if event["event"] == "step"]
        if not steps:
            return
        # The median leaves out the first steps, in which tables and plans are made.
        rates = sorted(event["tokens_per_second"] for event in steps)
        self._newest, self._rate = steps[-1], rates[len(rates) // 2]
        step, loss = self._newest["step"], self._newest["loss"]
        if self._bar is not None:
            self._bar.update(step, loss, self._rate)
            return
        parts = _PARTS * (step - self._first) // self._length
        if self._parts_told < parts < _PARTS:
            self._parts_told = parts
            print(f"  step {step:4d}  loss {loss:.4f}  {self._rate:,.0f} tokens/s", flush=True)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._newest is not None:
            seconds = time.perf_counter() - self._started
            print(
                f"{self._title}: step {self._newest['step']}, loss {self._newest['loss']:.4f}, "
                f"{self._rate:,.0f} tokens/s, {seconds:.0f} s in all",
                flush=True,
            )
