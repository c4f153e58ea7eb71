"""Schedules sections: some alone, the others beside each other, and for how long.

Time that a section leaves over is that of those which come after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from tools.first_gpu.catalogue import Section
from tools.first_gpu.options import Options
from tools.first_gpu.watch import Watch

_RESERVED: Final = 0.06
"""Part of the time in which no case begins: those that run come to their end in it."""


@dataclass(frozen=True)
class _Phase:
    """Sections that run beside each other."""

    sections: tuple[Section, ...]
    at_once: int

    @property
    def cost(self) -> float:
        """What share of the time it should have."""
        return sum(one.weight for one in self.sections) / self.at_once


def run(options: Options, file: Path, log: Path, tell: Callable[[Section], None]) -> None:
    """Run all sections; `tell` is called when one has ended."""
    start, seconds = time.monotonic(), 60 * options.minutes
    until, end = start + (1 - _RESERVED) * seconds, start + seconds
    phases, interrupted = _phases(options.sections, options.at_once), threading.Event()
    for at, phase in enumerate(phases):
        share = phase.cost / sum(one.cost for one in phases[at:])
        now = time.monotonic()
        stop = now + share * max(until - now, 0.0)
        _Running(phase, stop, end, interrupted).run(options, file, log, tell)


def _phases(sections: Sequence[Section], at_once: int) -> list[_Phase]:
    made = []
    for alone, group in groupby(sections, key=lambda one: one.alone):
        members = tuple(group)
        if alone:
            made += [_Phase((one,), 1) for one in members]
        else:
            made.append(_Phase(members, min(at_once, len(members))))
    return made


class _Running:
    """One phase while it runs."""

    def __init__(
        self, phase: _Phase, stop: float, end: float, interrupted: threading.Event
    ) -> None:
        self._phase, self._stop, self._end = phase, stop, end
        self._interrupted = interrupted
        self._lock = threading.Lock()
        self._ahead = sum(one.weight for one in phase.sections)

    def run(self, options: Options, file: Path, log: Path, tell: Callable[[Section], None]) -> None:
        def one(section: Section) -> None:
            if self._interrupted.is_set():
                return
            until = self._until(section)
            Watch(section, options, file, log, until, self._end, self._interrupted).run()
            tell(section)

        with ThreadPoolExecutor(self._phase.at_once) as pool:
            try:
                list(pool.map(one, self._phase.sections))
            except BaseException:
                # Sections have processes of their own, which no signal of a terminal reaches. Set
                # before the pool is left, which waits for its threads.
                self._interrupted.set()
                raise

    def _until(self, section: Section) -> float:
        """When a section that begins now begins no more cases."""
        with self._lock:
            now = time.monotonic()
            left = max(self._stop - now, 0.0)
            share = left * self._phase.at_once * section.weight / self._ahead
            self._ahead -= section.weight
        # Never beyond the phase: sections behind it have the rest.
        return now + min(share, left)
