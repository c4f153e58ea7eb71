"""Compares what ranks have executed in all, as their world or their program ends.

After its last step no rank comes to a collective any more at which a difference would be noticed.
So each rank says how its logs end, and waits until it knows the same of those that it compares
itself with, or knows that they are as far: some seconds at most. Who ends later compares itself
with what others have left in the store.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from vescale_comm._watchdog.execution_log import ExecutionLog
from vescale_comm._watchdog.log_store import LogStore, entries_text

# Between two looks at the store, at first and in the long run; its server answers all ranks.
_FIRST_PAUSE, _LONGEST_PAUSE, _LOOKS_PER_SECOND = 0.001, 0.05, 4000
# Everybody of so small a log is asked; else the neighbours are.
_SMALL = 8
# Events that are left for those who come later, in small worlds and in large ones.
_TOLD, _TOLD_BY_MANY, _MANY = 64, 16, 64


class LastComparison:
    """One rank's end. Methods may raise RuntimeError: the store, or its server, is gone.

    Args:
        store: what the ranks tell each other.
        logs: of this rank, to which nothing is added any more.
        has_ended: whether another rank is known to do nothing any more.
        is_over: whether it is known that ranks differ, by what others have found.
    """

    def __init__(
        self,
        store: LogStore,
        logs: Sequence[ExecutionLog],
        has_ended: Callable[[int], bool],
        is_over: Callable[[], bool],
    ) -> None:
        self._store, self._has_ended, self._is_over = store, has_ended, is_over
        self._logs = logs
        self._is_behind = False

    def publish(self) -> None:
        """Say how the logs of this rank end."""
        rank = self._store.rank
        most = _TOLD if self._store.size <= _MANY else _TOLD_BY_MANY
        for log in self._logs:
            self._store.set(f"last/{log.key}/{rank}", entries_text(log, most, at_end=True))
            # Afterwards: who finds how it ends finds the words as well.
            self._store.set_pair(f"end/{log.key}/{rank}", log.count, log.digest)

    def difference(self, deadline: float) -> tuple[ExecutionLog, int] | None:
        """Return a log in which this rank differs, and from whom.

        Args:
            deadline: time of `time.monotonic` at which others are not waited for any longer.
        """
        unknown = [(log, other) for log in self._logs for other in self._others(log)]
        for _ in self._looks(deadline):
            found = {pair: self._agrees(*pair) for pair in unknown}
            differing = [pair for pair, agrees in found.items() if agrees is False]
            if differing:
                return differing[0]
            unknown = [pair for pair, agrees in found.items() if agrees is None]
            if not unknown or self._is_over():
                return None
        return None

    def leave(self) -> None:
        """Say that this rank asks for nothing any more."""
        self._store.add("compared")

    def wait_for_all(self, deadline: float) -> None:
        """Keep the store until all others have compared themselves, or a time has come.

        Whoever has gone further waits for this rank, and is told of its end instead.
        """
        if self._is_behind:
            return
        for _ in self._looks(deadline):
            if self._store.add("compared", 0) >= self._store.size:
                return

    def _others(self, log: ExecutionLog) -> list[int]:
        """Ranks with which this one compares itself, as they do with this one."""
        own = self._store.rank
        if len(log.ranks) <= _SMALL:
            return [rank for rank in log.ranks if rank != own]
        at = log.ranks.index(own)
        # Both: of two neighbours one ends later, and finds what the other one has left.
        return [log.ranks[at - 1], log.ranks[(at + 1) % len(log.ranks)]]

    def _looks(self, deadline: float) -> Iterator[None]:
        pause, longest = _FIRST_PAUSE, max(_LONGEST_PAUSE, self._store.size / _LOOKS_PER_SECOND)
        while True:
            yield
            if time.monotonic() >= deadline:
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _agrees(self, log: ExecutionLog, other: int) -> bool | None:
        """Whether another rank has executed the same; None as long as that is not known."""
        end = self._store.pair(f"end/{log.key}/{other}")
        if end is not None:
            # A log with a name may be of another thread, which ends anywhere with its process.
            return end == (log.count, log.digest) or (log.name != "" and end[0] != log.count)
        theirs, ours = self._store.published(log, other), log.digests()
        shared = max(ours.keys() & theirs.keys(), default=None)
        if shared is not None and ours[shared] != theirs[shared]:
            return False
        # Who is further waits for this rank, and hears that it has ended; or goes on without it,
        # and compares itself at its own end. Nothing more is heard of who raised or was killed.
        reached = max(theirs, default=0)
        self._is_behind |= reached > log.count
        return True if reached >= log.count or self._has_ended(other) else None
