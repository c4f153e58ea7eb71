"""Writes what the ranks of a world do: the cause first, one line for all that do the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vescale_comm._torch.ranks import named
from vescale_comm._watchdog.channel import Answer, Ending

# How backends say that a peer is not there any more; they have no exceptions of their own.
_ENDED = ("connection closed", "connection reset", "connection refused", "broken pipe", "remote")


@dataclass(frozen=True, slots=True)
class WorldState:
    """What is known of the ranks of a world.

    Attributes:
        size: number of ranks.
        answers: what ranks said where they are.
        endings: what ranks said when they ended.
        gone: ranks whose process is known to be gone, and what became of it.
        answered: whether all that live have had the time to answer.
    """

    size: int
    answers: Mapping[int, Answer] = field(default_factory=dict)
    endings: Mapping[int, Ending] = field(default_factory=dict)
    gone: Mapping[int, str] = field(default_factory=dict)
    answered: bool = True

    def explains(self) -> bool:
        """Return whether some rank is known to have ended that others may wait for."""
        first = any(not each.consequence for each in self.endings.values())
        # A rank that said why it ended is gone for that reason.
        return first or any(rank not in self.endings for rank in self.gone)

    def complete(self) -> bool:
        """Return whether every rank is accounted for."""
        return len({*self.answers, *self.endings, *self.gone}) == self.size


def report(state: WorldState, *, without: int | None = None) -> str:
    """Write a line for all ranks that do the same; first those that others wait for.

    Args:
        state: of all ranks.
        without: a rank of which nothing is said: it speaks.
    """
    lines: dict[tuple[int, str], list[int]] = {}
    known: dict[tuple[int, int, str | None], tuple[int, str] | None] = {}
    for rank in range(state.size):
        # Many ranks share one object: whom they wait for is found once.
        ending, answer = id(state.endings.get(rank)), id(state.answers.get(rank))
        said = ending, answer, state.gone.get(rank)
        if said not in known:
            known[said] = _line(state, rank)
        line = None if rank == without else known[said]
        if line is not None:
            lines.setdefault(line, []).append(rank)
    ordered = sorted(lines.items(), key=lambda item: (item[0][0], item[1]))
    return "\n".join(f"  {named(ranks)}: {text}" for (_, text), ranks in ordered)


def _line(state: WorldState, rank: int) -> tuple[int, str] | None:
    """How early the line of a rank comes, and what it says."""
    ending, answer = state.endings.get(rank), state.answers.get(rank)
    if ending is not None:
        return (5 if ending.consequence else 0 if ending.raised else 2), ending.text
    if rank in state.gone:
        return 1, state.gone[rank]
    if answer is None:
        silent = "no answer: its process or its host is gone, or stands still"
        return (3, silent) if state.answered else None
    return (4 if answer.waits else 2), answer.text + _missing(state, answer)


def missing(state: WorldState, answer: Answer) -> list[int]:
    """Return whom a rank waits for: members of its group that are not in the same collective."""
    there = {rank for rank, each in state.answers.items() if _same(each, answer)}
    # Who was in it and has given up did come.
    failed = {rank for rank, each in state.endings.items() if _same(each, answer)}
    present = (there - {*state.endings, *state.gone}) | failed
    return [rank for rank in answer.ranks if rank not in present]


def _missing(state: WorldState, answer: Answer) -> str:
    found = missing(state, answer) if answer.waits else []
    return f"; missing: {named(found)}" if found else ""


def _same(one: Answer | Ending, other: Answer) -> bool:
    return (one.ranks, one.op) == (other.ranks, other.op)


def is_lost_connection(text: str) -> bool:
    """Return whether a backend says with these words that another rank is not there any more."""
    return any(words in text.lower() for words in _ENDED)


def is_timeout(text: str) -> bool:
    """Return whether a backend says with these words that another rank did not come in time."""
    return "timed out" in text.lower() or "timeout" in text.lower()
