"""Exchanges execution logs between ranks, by keys of the store of their world."""

import json
import struct
from collections.abc import Sequence
from typing import Any

from torch.distributed.distributed_c10d import Store

from vescale_comm._torch.launcher import which_start
from vescale_comm._watchdog.bounded_store import connected
from vescale_comm._watchdog.drift_report import Entry, Position
from vescale_comm._watchdog.execution_log import WINDOW, ExecutionLog
from vescale_comm._watchdog.store_reads import parsed_json, ranks_of, text_of

_PAIR = struct.Struct("<qq")


class LogStore:
    """One rank's end. Every method may raise RuntimeError: the store, or its server, is gone.

    Args:
        store: of the world. A connection of its own is made.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.operations = 0
        self.rank, self.size = rank, size
        base = connected(store, f"vescale_comm/logs/{which_start()}")
        # The store may outlive a world of these ranks: what an earlier one has written stays there.
        # Worlds of one size are counted by themselves, as ranks that join tell no more.
        joined = base.add(f"joined/{size}", 1)
        self._base, self._world = base, f"{size}/{(joined - 1) // size}"
        self._epoch = -1
        self.renew()

    def renew(self) -> None:
        """Begin anew, as every rank has to at the same point of the program."""
        self._epoch += 1
        self._store = self._base.within(f"{self._world}.{self._epoch}")

    @property
    def is_silent(self) -> bool:
        """Whether the store does not answer at present."""
        return self._base.is_silent

    def publish(self, log: ExecutionLog) -> int:
        """Say how far a log of this rank is; return the number of its last event."""
        digests = log.digests()
        self.set(f"state/{log.key}/{self.rank}", packed_digests(digests))
        return max(digests, default=0)

    def published(self, log: ExecutionLog, rank: int) -> dict[int, int]:
        """Return what a rank has published of a log: digests by number of the last event."""
        found = self.get(f"state/{log.key}/{rank}")
        whole = len(found) - len(found) % _PAIR.size if found else 0
        return dict(_PAIR.iter_unpack(found[:whole])) if found else {}

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self.operations += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        """Return a value; None where there is none."""
        self.operations += 2
        return self._store.get(key)

    def pair(self, key: str) -> tuple[int, int] | None:
        """Return a value of two numbers; None where there is none."""
        found = self.get(key)
        return None if found is None or len(found) != _PAIR.size else _PAIR.unpack(found)

    def set_pair(self, key: str, first: int, second: int) -> None:
        """Write a value of two numbers."""
        self.set(key, _PAIR.pack(first, second))

    def decide(self, key: str, word: str) -> str:
        """Decide, unless another rank has; return what is decided.

        Who waits no longer may cross with who comes late.
        """
        self.operations += 1
        return self._store.compare_set(key, "", word).decode()

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, and return what it is then."""
        self.operations += 1
        return self._store.add(key, amount)


def packed_digests(digests: dict[int, int]) -> bytes:
    """Write digests by number as they are published."""
    return b"".join(_PAIR.pack(*item) for item in digests.items())


def entries_text(log: ExecutionLog, most: int = WINDOW, *, at_end: bool = False) -> bytes:
    """Write the last events of a log as they are reported to other ranks.

    Args:
        log: the log.
        most: how many events.
        at_end: whether nothing will be added: numbers noted after the last event are told, too.
    """
    events = log.events()[-most:]
    notes = log.notes()
    rows: list[list[object]] = [
        [e.number, e.digest, e.value, _text(e.what), e.site, notes.get(e.number, [])]
        for e in events
    ]
    following = log.count + 1
    # Of what is only said there nothing was to be compared.
    noted = log.digest != (events[-1].digest if events else 0)
    if at_end and noted and following in notes:
        rows.append([following, log.digest, 0, "the end of the program", "", notes[following]])
    return json.dumps(rows).encode()


def parsed_entries(told: bytes) -> Sequence[Entry] | None:
    """Return what `entries_text` has written; None where it is nothing of the kind."""
    return parsed_json(told, lambda rows: [_entry(*row) for row in rows])


def _entry(number: Any, digest: Any, value: Any, what: Any, site: Any, notes: Any) -> Entry:
    first, second, third = ranks_of([number, digest, value])
    return Entry(first, second, third, text_of(what), text_of(site), [text_of(n) for n in notes])


def positions_of(said: Any) -> dict[str, Position]:
    """Return where a rank is in its logs, of what it has reported."""
    return {key: _position(one["number"], one["ranks"], one["words"]) for key, one in said.items()}


def _position(number: Any, ranks: Any, words: Any) -> Position:
    (count,) = ranks_of([number])
    return Position(count, ranks_of(ranks), text_of(words))


def alarm_of(said: Any) -> dict[str, Any]:
    """Return an alarm: a report, or whose logs differ and who tells."""
    if "report" in said:
        return {"report": text_of(said["report"])}
    ranks, tellers = ranks_of(said["ranks"]), ranks_of(said["tellers"])
    return {"key": text_of(said["key"]), "ranks": ranks, "tellers": tellers}


def position_of(log: ExecutionLog) -> Position:
    """Where a log is, as it is reported to other ranks."""
    last = log.events()[-1:]
    words = f"{_text(last[0].what)}, {last[0].site}" if last else "at no event"
    return Position(log.count, log.ranks, words)


def _text(what: object) -> str:
    return " ".join(map(_short, what)) if isinstance(what, tuple) else _short(what)


def _short(part: object) -> str:
    return str(list(part)) if isinstance(part, tuple) else str(part)
