"""Exchanges what ranks report of waits, by a few keys of the store of their world."""

import dataclasses
import json
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from vescale_comm._torch.launcher import which_start
from vescale_comm._torch.ranks import ranks_of_runs, runs
from vescale_comm._watchdog.bounded_store import connected
from vescale_comm._watchdog.crash import crash_of
from vescale_comm._watchdog.store_reads import parsed_json, ranks_of, text_of

_Said = TypeVar("_Said")
# Of so many failures each is told in words, and of so many characters; who fails later is listed.
_MOST_FAILURES, _MOST_TEXT = 256, 2000
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


_FINISHED = Ending("reached the end of its program", raised=False)
_FAILED = Ending("raised as well, later than many others", consequence=True)


class Channel:
    """One rank's end. Every method may raise RuntimeError: the store, or its server, is gone.

    What all ranks say is one value of the store, which each writes behind the others' words: who
    reads it reads once.

    Args:
        store: of the world. A connection of its own is made: a thread that waits in the store keeps
            the one it uses.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = connected(store, f"vescale_comm/watchdog/{which_start()}")
        # Process, and where it writes when it crashes, by rank of this host.
        self._processes: dict[int, tuple[int, str | None]] = {}

    @property
    def is_silent(self) -> bool:
        """Whether the store does not answer at present."""
        return self._store.is_silent

    def introduce(self, note: Path | None = None) -> None:
        """Say which process this rank is, and where it writes when it crashes."""
        process = self.rank, os.getpid(), None if note is None else str(note)
        self._store.append(f"host/{_host()}", f"{json.dumps(process)}\n")

    def ask(self, last: int | None = None) -> int:
        """Ask every rank where it is; return the number of the question.

        Args:
            last: the last question that is known. Of ranks that ask at the same time one does.
        """
        known = self.asked() if last is None else last
        self._store.compare_set("asked", str(known) if known else "", str(known + 1))
        return known + 1

    def asked(self) -> int:
        """Return the number of the last question; 0 if there was none."""
        return parsed_json(self._store.get("asked"), lambda said: ranks_of([said])[0]) or 0

    def answer(self, question: int, answer: Answer) -> None:
        """Answer a question."""
        self._store.append(f"answers/{question}", f"{self.rank} {json.dumps(fields(answer))}\n")

    def answers(self, question: int) -> dict[int, Answer]:
        """Return the answers to a question so far, by rank."""
        return self._said(f"answers/{question}", answer_of)

    def tells(self, question: int) -> bool:
        """Whether this rank gathers the answers to a question for all: the first that asks this."""
        return self._store.compare_set(f"teller/{question}", "", str(self.rank)) == self._word

    def tell(self, question: int, told: str) -> None:
        """Say what the answers are, as the one that gathers them."""
        self._store.set(f"told/{question}", told)

    def told(self, question: int) -> bytes | None:
        """Return what the answers are; None where they are not gathered yet."""
        return self._store.get(f"told/{question}")

    def end(self, ending: Ending) -> None:
        """Say that this rank ends."""
        words = json.dumps(fields(ending))
        self._store.set(f"ending/{self.rank}", words)
        if not ending.raised:
            self._store.append("finished", f"{self.rank}\n")
        elif self._store.add("failures", 1) <= _MOST_FAILURES:
            self._store.append("raised", f"{self.rank} {words}\n")
        else:
            self._store.append("failed", f"{self.rank}\n")
        # Counted after it was written: who sees the count finds the words.
        self._store.add("endings", 1)

    def ended(self) -> int:
        """Return how many ranks have said that they end."""
        return self._store.add("endings", 0)

    def raised(self) -> dict[int, Ending]:
        """Return what ranks have said that raised, by rank: the first ones of many."""
        return self._said("raised", ending_of)

    def ending(self, rank: int) -> Ending | None:
        """Return what a rank has said when it ended; None if it has not."""
        return parsed_json(self._store.get(f"ending/{rank}"), ending_of)

    def endings(self) -> dict[int, Ending]:
        """Return what ranks have said that have ended, by rank."""
        finished = dict.fromkeys(self._listed("finished"), _FINISHED)
        return finished | dict.fromkeys(self._listed("failed"), _FAILED) | self.raised()

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank has said that it ends, or its process is known to be gone."""
        return self._store.check(f"ending/{rank}") or bool(self.gone([rank]))

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
        self.learn()
        return self.known_gone(ranks)

    def learn(self) -> None:
        """Remember the processes of this host, for when the store cannot be asked any more."""
        lines = (self._store.get(f"host/{_host()}") or b"").splitlines()
        self._processes = dict(found for line in lines if (found := parsed_json(line, _process)))

    def known_gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return what `gone` does, of those ranks whose process is known; without the store."""
        known = {rank: self._processes[rank] for rank in ranks if rank in self._processes}
        return {
            rank: _fate(*process) for rank, process in known.items() if not _is_alive(process[0])
        }

    @property
    def _word(self) -> bytes:
        return str(self.rank).encode()

    def _said(self, key: str, made: Callable[[dict[str, Any]], _Said]) -> dict[int, _Said]:
        """What ranks wrote into one value; who says the same is given the same object."""
        lines = (self._store.get(key) or b"").splitlines()
        pairs = [line.partition(b" ") for line in lines]
        words = {each: parsed_json(each, made) for each in {word for _, _, word in pairs}}
        found = {_number(rank): words[word] for rank, _, word in pairs}
        return {rank: said for rank, said in found.items() if rank < self.size and said is not None}

    def _listed(self, key: str) -> list[int]:
        found = map(_number, (self._store.get(key) or b"").split())
        return [rank for rank in found if rank < self.size]


def _number(written: bytes) -> int:
    """Return a rank; one that no world has for what is none."""
    return int(written) if written.isdigit() and len(written) < 10 else 1 << 62


def fields(said: Answer | Ending) -> dict[str, Any]:
    """Write what a rank said as it is reported to others: short, however large its group is."""
    found = {each.name: getattr(said, each.name) for each in dataclasses.fields(said)}
    return found | {"text": said.text[:_MOST_TEXT], "ranks": runs(said.ranks)}


def answer_of(said: Any) -> Answer:
    """Return the answer that `fields` has written."""
    return Answer(text_of(said["text"]), text_of(said["op"]), ranks_of_runs(said["ranks"]))


def ending_of(said: Any) -> Ending:
    """Return the ending that `fields` has written."""
    raised, consequence = bool(said["raised"]), bool(said["consequence"])
    op, ranks = text_of(said["op"]), ranks_of_runs(said["ranks"])
    return Ending(text_of(said["text"]), raised, consequence, op, ranks)


def _process(said: Any) -> tuple[int, tuple[int, str | None]]:
    rank, pid, note = said
    (number,) = ranks_of([pid])
    # A signal to 0 or less goes to many processes.
    if number < 1 or "\0" in (note or ""):
        raise ValueError("no process")
    return ranks_of([rank])[0], (number, None if note is None else text_of(note))


def _fate(pid: int, note: str | None) -> str:
    crash = "" if note is None else crash_of(Path(note))
    cause = f"crashed in C++: {crash}" if crash else _SILENT
    # What it had received did not fit; nothing else of gloo's aborts.
    hint = "; gloo aborts where ranks call different collectives" if "Aborted" in crash else ""
    return f"its process ({pid} on {socket.gethostname()}) {cause}{hint}"


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
