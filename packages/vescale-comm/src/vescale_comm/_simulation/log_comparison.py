"""Compares the execution logs of a simulated world: each event with who came there before.

No collective completes before all its members have come. So whoever goes on from an event that
others have not come to yet has nothing of theirs: what differs is found before it is mixed up, and
no rank waits for it.
"""

from collections.abc import Collection, Hashable

from vescale_comm._errors import CommMismatchError
from vescale_comm._simulation.scheduler import Scheduler
from vescale_comm._watchdog.drift_report import drift_report
from vescale_comm._watchdog.execution_log import ExecutionLog
from vescale_comm._watchdog.log_store import entries_text, parsed_entries


class WorldLogs:
    """What the ranks of one simulation execute.

    Args:
        scheduler: of the ranks.

    Attributes:
        trouble: how they differ, once that is known.
        is_given_up: whether nothing is compared at the end.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.trouble: str | None = None
        self.is_given_up = False
        # Ranks that had returned when that became known.
        self._gone: list[int] = []
        self._scheduler = scheduler
        self._of_rank = [_RankLogs(self) for _ in scheduler.ranks]
        # By log and number of an event: its digest, and how many ranks have not come there yet.
        self._met: dict[tuple[str, int, int], tuple[int, int]] = {}

    def log(self, ranks: tuple[int, ...], name: str) -> ExecutionLog:
        """Return the log of these ranks by that name, of the rank that runs now."""
        own = self._of_rank[self._scheduler.current]
        if (ranks, name) not in own.logs:
            own.logs[ranks, name] = _ComparedLog(ranks, name, own)
        return own.logs[ranks, name]

    def forget(self) -> None:
        """Begin anew on the rank that runs now, as every rank does at this point."""
        self._of_rank[self._scheduler.current].reset()

    def enable(self, compare: bool) -> None:
        """Compare what the rank that runs now adds, or nothing more."""
        self._of_rank[self._scheduler.current].enabled = compare
        self.is_given_up |= not compare

    def compare(self, log: ExecutionLog, epoch: int) -> None:
        """Compare an event that the rank which runs now has added.

        Raises:
            CommMismatchError: another rank has added another one. It is raised there as well.
        """
        place = log.key, epoch, log.count
        digest, missing = self._met.pop(place, (log.digest, len(log.ranks)))
        if missing > 1:
            self._met[place] = digest, missing - 1
        if digest != log.digest:
            self.trouble = self._report((log.ranks, log.name))
            self._gone = [rank.index for rank in self._scheduler.ranks if rank.done]
            # What others wait for does not come any more.
            self._scheduler.interrupt_others(CommMismatchError, self.trouble)
            raise CommMismatchError(self.trouble)

    def untold(self, raised: Collection[int]) -> dict[int, str]:
        """Return by rank how ranks differ that have come to an end, where no error has said so.

        Args:
            raised: the ranks that ended by an error.
        """
        if self.trouble is not None:
            return dict.fromkeys(self._gone, self.trouble)
        # A collective that failed has said what was wrong, and is in the logs of some ranks only.
        has_failed = raised or self.is_given_up or self._scheduler.was_stuck
        for rank in () if has_failed else self._of_rank:
            for ranks, name in rank.logs:
                ends = {self._end(other, (ranks, name)) for other in ranks}
                # A log with a name may be of another thread, which ends anywhere.
                if len(ends) > 1 and not name:
                    everybody = range(len(self._of_rank))
                    return dict.fromkeys(everybody, self._report((ranks, name)))
        return {}

    def _end(self, rank: int, key: tuple[tuple[int, ...], str]) -> tuple[int, int]:
        log = self._of_rank[rank].logs.get(key)
        return (0, 0) if log is None else (log.count, log.digest)

    def _report(self, key: tuple[tuple[int, ...], str]) -> str:
        logs = {rank: self._of_rank[rank].logs.get(key) for rank in key[0]}
        ended = [rank for rank in logs if self._scheduler.ranks[rank].done]
        told = {
            rank: parsed_entries(entries_text(log, at_end=rank in ended)) or ()
            for rank, log in logs.items()
            if log is not None
        }
        return drift_report(key[0], told, ended=ended)


class _RankLogs:
    """The logs of one rank: a `LogComparison`."""

    def __init__(self, world: WorldLogs) -> None:
        self.logs: dict[tuple[tuple[int, ...], str], ExecutionLog] = {}
        self.enabled, self.epoch, self.world = True, 0, world

    @property
    def trouble(self) -> str | None:
        return self.world.trouble

    def error(self) -> CommMismatchError:
        return CommMismatchError(self.trouble)

    def reset(self) -> None:
        self.epoch += 1
        for log in self.logs.values():
            log.clear()

    def meet(self, log: ExecutionLog, count: int, value: int) -> None:
        """Nothing: every event is compared, with those who have come to it."""

    def agree(self, log: ExecutionLog, word: str, seconds: float) -> bool:
        """No: there is no clock by which others could be waited for."""
        return False


class _ComparedLog(ExecutionLog):
    """A log of which every event is compared as it is added."""

    def __init__(self, ranks: tuple[int, ...], name: str, own: _RankLogs) -> None:
        super().__init__(ranks, name, own)
        self._own = own

    def record(self, what: Hashable, detail: int = 0, *, together: bool = False) -> None:
        super().record(what, detail, together=together)
        if self._own.enabled:
            self._own.world.compare(self, self._own.epoch)
