"""What ranks tell each other about waits: a few keys of the store of their world."""

import json
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from vescale_comm._watchdog.crash import crash_of
from vescale_comm._watchdog.words import heard, ranks_of, text_of

T = TypeVar("T")

# An answer of a store that takes longer is none: its server has gone.
_STORE_SECONDS = 10
_SILENT = "ended without a word: killed, out of memory, or a crash"


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a rank is.

    Attributes:
        text: what it does, in words.
        op: the collective in which it waits for other ranks; empty if it does not.
        ranks: members of the group of that collective.
    """

    text: str
    op: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return bool(self.op)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a rank does nothing any more.

    Attributes:
        text: what became of it, in words.
        raised: whether it raised; otherwise it has come to the end of its program.
        consequence: whether it raised only because another one had ended.
        op: the collective that failed; empty if it was something else.
        ranks: members of the group of that collective.
    """

    text: str
    raised: bool = True
    consequence: bool = False
    op: str = ""
    ranks: tuple[int, ...] = ()


class Channel:
    """One rank's end. Every method may raise RuntimeError: the store, or its server, is gone.

    Args:
        store: of the world. A connection of its own is made: a thread that waits in the store keeps
            the one it uses.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        own: Any = store
        own = own.clone()
        own.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self._store = PrefixStore("vescale_comm/watchdog", own)
        # Host, process, and where it writes when it crashes, by rank, as far as it was asked for.
        self._processes: dict[int, tuple[str, int, str | None]] = {}

    def introduce(self, note: Path | None = None) -> None:
        """Say which process this rank is, and where it writes when it crashes."""
        process = _host(), os.getpid(), None if note is None else str(note)
        self._store.set(f"process/{self.rank}", json.dumps(process))

    def ask(self) -> int:
        """Ask every rank where it is; return the number of the question."""
        return self._store.add("asked", 1)

    def asked(self) -> int:
        """Return the number of the last question; 0 if there was none."""
        return self._store.add("asked", 0)

    def answer(self, question: int, answer: Answer) -> None:
        """Answer a question."""
        self._store.set(f"answer/{question}/{self.rank}", json.dumps(asdict(answer)))

    def answers(self, question: int) -> dict[int, Answer]:
        """Return the answers to a question so far, by rank."""
        keys = {rank: f"answer/{question}/{rank}" for rank in range(self.size)}
        return self._heard(keys, _answer)

    def end(self, ending: Ending) -> None:
        """Say that this rank ends."""
        self._store.set(f"ending/{self.rank}", json.dumps(asdict(ending)))
        # Counted after it was written: who sees the count finds the words.
        self._store.add("endings", 1)

    def ended(self) -> int:
        """Return how many ranks have said that they end."""
        return self._store.add("endings", 0)

    def endings(self) -> dict[int, Ending]:
        """Return what ranks have said that have ended, by rank."""
        return self._heard({rank: f"ending/{rank}" for rank in range(self.size)}, _ending)

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank has said that it ends, or its process is known to be gone."""
        return self._store.check([f"ending/{rank}"]) or bool(self.gone([rank]))

    def hear(self) -> None:
        """Say that this rank has read what others said at their end."""
        self._store.add("heard", 1)

    def heard(self) -> int:
        """Return how many ranks have."""
        return self._store.add("heard", 0)

    def gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return what became of those whose process is known to be gone: it ran on this host.

        What is not known is not said: a rank of another host is never in the result.
        """
        return self.known_gone(self._learned(ranks))

    def learn(self, rank: int) -> None:
        """Remember which process a rank is, for when the store cannot be asked any more."""
        self._learned([rank])

    def known_gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return what `gone` does, of those ranks whose process is known; without the store."""
        processes = {rank: self._processes[rank] for rank in ranks if rank in self._processes}
        return {
            rank: _fate(pid, host.split()[0], note)
            for rank, (host, pid, note) in processes.items()
            if host == _host() and not _is_alive(pid)
        }

    def _learned(self, ranks: Iterable[int]) -> list[int]:
        ranks = list(ranks)
        new = {rank: f"process/{rank}" for rank in ranks if rank not in self._processes}
        self._processes |= self._heard(new, _process)
        return ranks

    def _heard(self, keys: dict[int, str], make: Callable[[Any], T]) -> dict[int, T]:
        # Asked for one by one only where they are there: get waits for a key that is not.
        found = {
            rank: heard(self._store.get(key), make)
            for rank, key in keys.items()
            if self._store.check([key])
        }
        return {rank: one for rank, one in found.items() if one is not None}


def _answer(said: Any) -> Answer:
    return Answer(text_of(said["text"]), text_of(said["op"]), ranks_of(said["ranks"]))


def _ending(said: Any) -> Ending:
    raised, consequence = bool(said["raised"]), bool(said["consequence"])
    op, ranks = text_of(said["op"]), ranks_of(said["ranks"])
    return Ending(text_of(said["text"]), raised, consequence, op, ranks)


def _process(said: Any) -> tuple[str, int, str | None]:
    host, pid, note = said
    (number,) = ranks_of([pid])
    # A signal to 0 or less goes to many processes.
    if number < 1 or "\0" in (note or ""):
        raise ValueError("no process")
    return text_of(host), number, None if note is None else text_of(note)


def _fate(pid: int, host: str, note: str | None) -> str:
    crash = "" if note is None else crash_of(Path(note))
    cause = f"crashed in C++: {crash}" if crash else _SILENT
    # What it had received did not fit; nothing else of gloo's aborts.
    hint = "; gloo aborts where ranks call different collectives" if "Aborted" in crash else ""
    return f"its process ({pid} on {host}) {cause}{hint}"


def _host() -> str:
    """Name of this host; containers with one name have processes of the same numbers."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(namespace) if namespace.exists() else ''}"


def _is_alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # The name, in parentheses, may hold anything; the state is the letter after it.
            return state.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
