"""Compares the execution logs of ranks over the store of their world, beside the program.

One thread of each process publishes how far its logs are, and reads what one other rank has
published: the ranks of a log are compared in a ring, so that nobody's work grows with the world.
Where two differ, all of them tell what they executed, and every rank raises at its next event.

What is met for the first time, at a point where every rank waits for the others anyway, is compared
there and then (`meet`): a new shape on one rank would otherwise reach the backend, which mixes up
what differs or aborts. In the steady state of a program nothing is new.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import Store

from vescale_comm._errors import CommMismatchError
from vescale_comm._watchdog.bounded_store import StoreLostError
from vescale_comm._watchdog.drift_report import crossing, drift_report
from vescale_comm._watchdog.execution_log import ExecutionLog, token
from vescale_comm._watchdog.last_comparison import LastComparison
from vescale_comm._watchdog.log_store import (
    LogStore,
    alarm_of,
    entries_text,
    parsed_entries,
    position_of,
    positions_of,
)
from vescale_comm._watchdog.store_reads import parsed_json

# Between two looks at this rank's own logs, which cost nothing.
_LOOK_SECONDS = 0.25
# Between two exchanges over the store, at first and in the long run.
_FIRST_SECONDS, _MOST_SECONDS, _SLOWER = 0.25, 5.0, 1.3
# The server of the store has to answer all ranks.
_RANKS_PER_SECOND = 2000
# How long what is new waits for a rank that met it, or for the word that it did not, and which part
# of the timeout of collectives that may be. A rank that is busy elsewhere and then calls something
# else would be paired with this one by the backend, so it is waited for here as long as it runs; at
# last in the collective itself, whose timeout this must not add much to.
_LEAST_MEET_SECONDS, _MOST_MEET_SECONDS, _PART = 4.0, 20.0, 1 / 10
# Between two looks at what others say, at first and in the long run; and how long it takes a rank
# that stands still to say what it did at least.
_FIRST_PAUSE, _LONGEST_PAUSE, _SAID_SECONDS = 0.0002, 0.05, 0.01
# How long ranks have for telling what they executed, and how many of them are asked.
_TELL_SECONDS, _MOST_TELLERS = 6.0, 16
# For a rank that is late at the end. One that does something alone there is not waited for so long:
# what it has published tells that it is as far as the others.
END_SECONDS = 5.0
# Everybody of so small a log is asked at once what is new to it; else the neighbour is.
_SMALL = 8
# How many looks in a row a rank that has stopped asks whether others have found something; in
# worlds that are not too large for the server to answer so often.
_IDLE_LOOKS, _MANY = 40, 256
_LOG = logging.getLogger("vescale_comm")


class Comparison:
    """One rank's end.

    Args:
        store: of the world. A connection of its own is made.
        rank: this rank.
        size: number of ranks.
        active: whether the world is there.
        has_ended: whether another rank is known to do nothing any more. May raise RuntimeError.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        active: Callable[[], bool],
        has_ended: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self.enabled = True
        self.trouble: str | None = None
        self.was_raised = False
        self._rank, self._size, self._active = rank, size, active
        self._has_ended = has_ended
        self._store = LogStore(store, rank, size)
        self._open()
        self._logs: dict[tuple[tuple[int, ...], str], ExecutionLog] = {}
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._meet_seconds = _MOST_MEET_SECONDS
        self._pause = max(_FIRST_SECONDS, size / _RANKS_PER_SECOND)
        self._gone = self._finished = False

    def _open(self) -> None:
        self._alarms = 0
        self._published: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._told: dict[str, int] = {}

    def log(self, ranks: tuple[int, ...], name: str) -> ExecutionLog:
        """Return the log of these ranks, of which this one is, by that name."""
        with self._lock:
            if (ranks, name) not in self._logs:
                self._logs[ranks, name] = ExecutionLog(ranks, name, self)
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="vescale-comm-comparison", daemon=True
                )
                self._thread.start()
            return self._logs[ranks, name]

    @property
    def _lost(self) -> bool:
        """Whether the store cannot be asked: it is gone, or does not answer at present."""
        return self._gone or self._store.is_silent

    def _lose(self, error: RuntimeError) -> None:
        self._gone |= not isinstance(error, StoreLostError)

    def reset(self) -> None:
        """Begin anew, as every rank has to at the same point of the program."""
        with self._lock:
            self._store.renew()
            self._open()
            self.trouble = None
            for log in self._logs.values():
                log.clear()

    def bound_waits(self, timeout: float) -> None:
        """Add little to the time that a collective waits, in seconds."""
        self._meet_seconds = min(max(timeout * _PART, _LEAST_MEET_SECONDS), _MOST_MEET_SECONDS)

    @property
    def operations(self) -> int:
        """How often the store was used."""
        return self._store.operations

    def error(self) -> CommMismatchError:
        """Return `trouble` as an error that is about to be raised."""
        self.was_raised = True
        return CommMismatchError(self.trouble)

    def finish(self, *, serves: bool) -> None:
        """Compare what was executed in all, as the world or the program ends: for some seconds.

        Args:
            serves: whether the store ends with this process.
        """
        self._stopped.set()
        self._join()
        logs = [log for log in self._of_now() if log.count]
        if not self.enabled or not logs or self.was_raised:
            self.give_up()
        if self._finished or self._lost:
            return
        self._finished = True
        last = LastComparison(self._store, logs, self._has_ended, self._is_over)
        deadline = time.monotonic() + END_SECONDS
        with suppress(RuntimeError):  # the store, or the rank that serves it, has gone
            last.publish()
            differing = None if self.trouble is not None else last.difference(deadline)
            if differing is not None:
                self._raise_alarm(*differing)
            last.leave()
            if serves:
                # Others learn of a difference, and tell what they did, from this store: they may
                # have begun to only now.
                last.wait_for_all(
                    deadline if self.trouble is None else time.monotonic() + END_SECONDS
                )

    def give_up(self) -> None:
        """Say that this rank ends and compares nothing: what is wrong has been reported."""
        if not self._finished and not self._lost:
            self._finished = True
            with suppress(RuntimeError):
                self._store.add("compared")

    def _is_over(self) -> bool:
        self._hear()
        return self.trouble is not None

    def stop(self) -> None:
        """Compare no more."""
        self._stopped.set()
        self._join()
        self.enabled = False

    def _join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            # Before the interpreter ends: see `Watcher.close`.
            self._thread.join(2.0)

    def look(self) -> str | None:
        """Compare now, as before this rank ends, and return how the ranks differ."""
        if self.trouble is None and not self._lost and self.enabled and self._logs:
            with suppress(RuntimeError):
                self._exchange()
        return self.trouble

    def _run(self) -> None:
        exchange_at = time.monotonic() + self._pause
        counts: dict[str, int] = {}
        idle = 0
        while not self._stopped.wait(_LOOK_SECONDS) and not self._gone:
            if not self._active() or not self.enabled or self._lost:
                continue
            now, before = time.monotonic(), counts
            counts = {log.key: log.count for log in self._of_now()}
            idle = idle + 1 if counts == before else 0
            # Who has stopped may be waiting for a rank that went elsewhere, and that asks about it.
            stuck = idle and any(self._published.get(k) != n for k, n in counts.items())
            if idle and self._told != counts:
                self._guarded(self._tell_positions)
            if stuck or now >= exchange_at:
                self._pause = min(self._pause * _SLOWER, max(_MOST_SECONDS, self._pause))
                exchange_at = now + self._pause
                self._guarded(self._exchange)
            elif 0 < idle <= _IDLE_LOOKS and self._size <= _MANY:
                self._guarded(self._hear)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except RuntimeError as error:
            self._lose(error)

    def _hear(self) -> None:
        with self._lock:
            self._hear_alarms()

    def _of_now(self) -> list[ExecutionLog]:
        with self._lock:
            return list(self._logs.values())

    def _exchange(self) -> None:
        """Publish what is new here, and look at the neighbour's."""
        if self.trouble is not None:
            return
        with self._lock:
            for log in self._of_now():
                if log.count != self._published.get(log.key):
                    self._published[log.key] = self._store.publish(log)
                self._compare(log, self._left_of(log))
            self._hear_alarms()

    def _tell_positions(self) -> None:
        """Say where each log of this rank, which has stopped for now, is."""
        with self._lock:
            logs = self._of_now()
            before = [log.count for log in logs]
            said = {log.key: position_of(log)._asdict() for log in logs}
            # It may have gone on meanwhile, in one log after the other: what was read would then be
            # an order that never was, and look like ranks that wait for each other.
            if [log.count for log in logs] != before:
                return
            self._store.set(f"at/{self._rank}", json.dumps(said).encode())
            self._told = dict(zip(said, before, strict=True))

    def _left_of(self, log: ExecutionLog) -> int:
        return log.ranks[log.ranks.index(self._rank) - 1]

    def _compare(self, log: ExecutionLog, other: int) -> None:
        theirs = self._store.published(log, other)
        if not theirs or self._seen.get(log.key) == max(theirs) == log.count:
            return
        ours = log.digests()
        shared = max(ours.keys() & theirs.keys(), default=None)
        if shared is None:
            return
        # Digests hold all that came before: equal ones need no further look.
        if ours[shared] != theirs[shared]:
            self._raise_alarm(log, other)
        self._seen[log.key] = shared

    # What is new.

    def meet(self, log: ExecutionLog, count: int, value: int) -> None:
        """Wait until the others are at this event of a log, and compare its value.

        Raises:
            CommMismatchError: one of them is at another one.
        """
        if self._lost or not self._active():
            return
        try:
            self._store.set_pair(f"new/{log.key}/{self._rank}", count, value)
            small = len(log.ranks) <= _SMALL
            others = [r for r in log.ranks if r != self._rank] if small else [self._left_of(log)]
            deadline = time.monotonic() + self._meet_seconds
            for other in others:
                if not self._meets(log, other, count, value, deadline):
                    self._raise_alarm(log, other)
                    break
        except RuntimeError as error:
            self._lose(error)
        if self.trouble is not None:
            raise self.error()

    def agree(self, log: ExecutionLog, word: str, seconds: float) -> bool:
        """Whether every rank of a log says a word, the last within so many seconds of this one."""
        if self._lost or not self._active():
            return False
        try:
            return self._agrees(f"said/{log.key}/{token(word):x}", len(log.ranks), seconds)
        except RuntimeError as error:
            self._lose(error)
            return False

    def _agrees(self, key: str, ranks: int, seconds: float) -> bool:
        decided = f"{key}/decided"
        if self._store.add(key) == ranks:
            return self._store.decide(decided, "yes") == "yes"
        pause, deadline = _FIRST_PAUSE, time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self._store.get(decided)
            if found is not None:
                return found == b"yes"
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self._store.decide(decided, "no") == "yes"

    def _meets(
        self, log: ExecutionLog, other: int, count: int, value: int, deadline: float
    ) -> bool:
        """Whether another rank executes the same here, as far as that can be known."""
        pause = _FIRST_PAUSE
        while time.monotonic() < deadline and self.trouble is None:
            there, said = self._store.pair(f"new/{log.key}/{other}") or (0, 0)
            if there >= count:
                return bool(there > count or said == value)
            # It may be here and know the value, so that it says nothing but in its state.
            if pause > _SAID_SECONDS:
                theirs, ours = self._store.published(log, other), log.digests()
                if count in theirs:
                    return theirs[count] == ours.get(count, theirs[count])
                # Who is past it has passed it; who has ended is named by the collective.
                if max(theirs, default=0) > count or self._has_ended(other):
                    return True
                if self._is_elsewhere(log, other, count):
                    return True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _is_elsewhere(self, log: ExecutionLog, other: int, count: int) -> bool:
        """Whether the other rank has gone to an event of another log first, and tell everybody.

        Both would wait for ever, or until the backend pairs what does not belong together. An old
        position proves it as well: whatever that rank does later, it did not come here before.
        """
        theirs = parsed_json(self._store.get(f"at/{other}"), positions_of)
        if theirs is None:
            return False
        with self._lock:
            ours = {each.key: each.count for each in self._of_now()}
            there = theirs.get(log.key)
            if there is not None and there.number >= count:
                return False
            for key, position in theirs.items():
                if self._rank in position.ranks and position.number > ours.get(key, 0):
                    report = crossing({self._rank: position_of(log), other: position})
                    self._announce({"report": report})
                    return True
        return False

    # What became of it.

    def _raise_alarm(self, log: ExecutionLog, other: int) -> None:
        # Not while the thread is at it: who has seen a difference must not go on without a word.
        with self._lock:
            self._tell_everybody(log, other)

    def _tell_everybody(self, log: ExecutionLog, other: int) -> None:
        tellers = [self._rank, other, *(r for r in log.ranks if r not in (self._rank, other))]
        told = {"key": log.key, "ranks": log.ranks, "tellers": sorted(tellers[:_MOST_TELLERS])}
        self._announce(told)

    def _announce(self, alarm: Mapping[str, object]) -> None:
        self._store.set(f"alarm/{self._store.add('alarms')}", json.dumps(alarm).encode())
        self._hear_alarms()

    def _hear_alarms(self) -> None:
        """Tell what was executed here, and find out from all where they differ."""
        while self.trouble is None and self._alarms < self._store.add("alarms", 0):
            number = self._alarms + 1
            alarm = self._awaited([f"alarm/{number}"]).get(f"alarm/{number}")
            said = parsed_json(alarm, alarm_of)
            if said is None:
                self._alarms = number
                continue
            if "report" in said:
                self._end(said["report"])
                continue
            log = next((each for each in self._of_now() if each.key == said["key"]), None)
            if log is not None and self._rank in said["tellers"]:
                self._store.set(f"window/{number}/{self._rank}", entries_text(log))
            self._end(self._report_of(said, number))

    def _report_of(self, said: Mapping[str, Any], number: int) -> str:
        """Name the first event that differs, by what ranks tell or have left at their end."""
        windows, left = (
            {f"{name}/{rank}": rank for rank in said["tellers"]}
            for name in (f"window/{number}", f"last/{said['key']}")
        )
        # Whoever has ended tells nothing any more.
        ended = {rank: last for key, rank in left.items() if (last := self._store.get(key))}
        asked = [key for key, rank in windows.items() if rank not in ended]
        told = ended | {windows[key]: window for key, window in self._awaited(asked).items()}
        entries = {rank: parsed_entries(told[rank]) for rank in sorted(told)}
        known = {rank: found for rank, found in entries.items() if found is not None}
        return drift_report(said["ranks"], known, ended=ended.keys() & known.keys())

    def _end(self, report: str) -> None:
        self.trouble = report
        _LOG.error("%s", report)

    def _awaited(self, keys: Iterable[str]) -> dict[str, bytes]:
        """What ranks tell within a time; who is gone tells nothing."""
        found: dict[str, bytes] = {}
        missing, deadline = list(keys), time.monotonic() + _TELL_SECONDS
        while missing:
            for key in missing:
                value = self._store.get(key)
                if value is not None:
                    found[key] = value
            missing = [key for key in missing if key not in found]
            if time.monotonic() >= deadline:
                break
            if missing:
                time.sleep(0.02)
        return found
