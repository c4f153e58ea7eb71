"""Measures whether replays of a unit are faster than its forward, and decides once for all ranks.

Guards cost time at every call, and what they cost depends on the model. So of the calls FIRST to
LAST that train, every other one runs the forward as it is, and both kinds are timed. At the last
one the ranks tell each other their times. Results are the same either way.
"""

from __future__ import annotations

from statistics import median
from time import thread_time_ns
from typing import Final

from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import group_of
from vescale_comm.agreement import gather_numbers

from vescale_parallel._common.torch_compat import no_torch_function

# Later than what is made once: programs, states of optimizers, memory.
FIRST, LAST = 33, 64
# Calls that are compared, or that no program stands for, are no samples.
_FEWEST: Final = 4

now = thread_time_ns
"""Processor time of this thread in ns: neither waiting for other ranks, nor what others compute."""


class ReplaySpeed:
    """What the calls of a unit cost with and without its programs.

    Args:
        mesh: whose ranks make the same calls; None: all ranks do.

    Attributes:
        is_decided: whether calls need not be counted any more.
        verdict: why the forward runs as it is from now on, in words; "" where programs are used.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.is_decided, self.verdict = False, ""
        self._mesh = mesh
        self._calls = 0
        self._eager: list[int] = []
        self._replayed: list[int] = []

    @property
    def takes_turns(self) -> bool:
        """Whether both kinds of calls are being timed."""
        return not self.is_decided and self._calls + 1 >= FIRST

    @property
    def is_eager_next(self) -> bool:
        """Whether the next call that counts is to run the forward as it is."""
        return self.takes_turns and self._calls % 2 == 1

    def note(self, nanoseconds: int, *, eager: bool, is_sample: bool) -> None:
        """A call was made.

        Args:
            nanoseconds: that it took.
            eager: whether it ran the forward.
            is_sample: whether it did nothing but that, or replay.
        """
        self._calls += 1
        if is_sample and self._calls >= FIRST:
            (self._eager if eager else self._replayed).append(nanoseconds)

    @property
    def is_due(self) -> bool:
        """Whether the ranks decide now. They count the same calls."""
        return not self.is_decided and self._calls >= LAST

    def decide(self, refusal: str) -> None:
        """Tell the other ranks what the calls took, and keep to what is faster. Collective.

        Args:
            refusal: why this rank has no programs, and never will; "" where it may have.
        """
        known = min(len(self._eager), len(self._replayed)) >= _FEWEST
        own = [median(self._replayed), median(self._eager)] if known else [0, 0]
        group = None if self._mesh is None else group_of(self._mesh, tuple(range(self._mesh.ndim)))
        with no_torch_function():  # no part of a program that a mode records
            rows = gather_numbers([*map(int, own), int(known), int(bool(refusal))], group)
        self.is_decided, self._eager, self._replayed = True, [], []
        if all(refused for *_, refused in rows):
            self.verdict = refusal
        elif all(enough for _, _, enough, _ in rows):
            replay, forward = (sum(row[at] for row in rows) / len(rows) / 1e3 for at in (0, 1))
            if replay >= forward:
                self.verdict = (
                    f"its replay takes {replay:.0f} µs of a rank's processor time, its forward "
                    f"{forward:.0f} µs"
                )
