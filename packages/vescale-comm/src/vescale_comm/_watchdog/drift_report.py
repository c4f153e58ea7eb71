"""Reports ranks that executed different things: who, what, and at which line."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vescale_comm._torch.ranks import named


@dataclass(frozen=True, slots=True)
class Entry:
    """An event as it is reported to other ranks; see `Event`.

    Attributes:
        before: what led to it, in words, the last at the end.
    """

    count: int
    digest: int
    value: int
    what: str
    site: str
    before: Sequence[str] = ()


class Position(NamedTuple):
    """Where a rank is in one of its logs.

    Attributes:
        number: of the last event.
        ranks: of the log.
        words: the last event.
    """

    number: int
    ranks: Sequence[int]
    words: str


def crossing(positions: Mapping[int, Position]) -> str:
    """Name the events at which ranks wait for each other, each at one that the others lack."""
    together = named(sorted({rank for position in positions.values() for rank in position.ranks}))
    told = "\n".join(
        f"  {named([rank])}: {position.words} (together with {named(list(position.ranks))})"
        for rank, position in sorted(positions.items())
    )
    return (
        f"the ranks have diverged ({together} execute one program together): "
        f"they wait for each other at different calls.\n{told}\n{_ADVICE}"
    )


def drift_report(
    ranks: Sequence[int],
    windows: Mapping[int, Sequence[Entry]],
    *,
    ended: Collection[int] = (),
) -> str:
    """Name the first event that is not the same on all ranks.

    Args:
        ranks: of the log.
        windows: by rank, what is known of its last events.
        ended: ranks to whose events nothing will be added.
    """
    head = f"the ranks have diverged ({named(list(ranks))} execute one program together)"
    differing = first_difference(windows, ended)
    if differing is None:
        said = "; ".join(f"rank {rank} is {_last(window)}" for rank, window in windows.items())
        return f"{head}, earlier than what is remembered: {said}.\n{_ADVICE}"
    count, entries = differing
    made = _made_by(count, entries, windows)
    lines: dict[tuple[str, int | None], list[int]] = {}
    for rank in sorted(entries):
        entry = entries[rank]
        text = _line(entry, entries, made.get(rank, ""), ended=rank in ended)
        # Of all that came before as well: what was noted there may be all that differs.
        value = None if entry is None else entry.digest
        lines.setdefault((text, value), []).append(rank)
    # The few that differ from the rest come first.
    ordered = sorted(lines.items(), key=lambda item: (len(item[1]), item[1]))
    told = "\n".join(f"  {named(those)}: {text}" for (text, _), those in ordered)
    return f"{head}: they differ from event {count} on.\n{told}\n{_ADVICE}"


_ADVICE = (
    "All ranks have to execute the same on distributed tensors: the same calls, shapes and layouts "
    "in the same order, the same modes (train, eval), and generators in the same state."
)


def first_difference(
    windows: Mapping[int, Sequence[Entry]], ended: Collection[int] = ()
) -> tuple[int, dict[int, Entry | None]] | None:
    """Return the first event that differs, and what each rank did there; None if none is known."""
    by_count = {rank: {e.count: e for e in window} for rank, window in windows.items()}
    # From where on everybody's window has something to say.
    start = max((min(known, default=0) for known in by_count.values()), default=0)
    for count in range(start, max(max(known, default=0) for known in by_count.values()) + 1):
        entries = {rank: known.get(count) for rank, known in by_count.items()}
        there = [each for each in entries.values() if each is not None]
        lacking = there and any(rank in ended and entries[rank] is None for rank in entries)
        if len({each.value for each in there}) > 1 or lacking:
            return count, entries
        if len({each.digest for each in there}) > 1:
            # Equal events after equal ones: numbers in between that were noted (`note`) differ.
            known = [by_count[rank].get(count - 1) for rank, each in entries.items() if each]
            before = {None if each is None else each.digest for each in known}
            alike = count == 1 or (len(before) == 1 and None not in before)
            return (count, entries) if alike else None
    return None


def _line(
    entry: Entry | None, entries: Mapping[int, Entry | None], made: str, *, ended: bool
) -> str:
    if entry is None:
        return "has ended without it" if ended else "has not come so far"
    text = f"{entry.what}, {entry.site}" if entry.site else entry.what
    if len({each.what for each in entries.values() if each is not None}) > 1:
        return text
    # The event is one and the same: what led to it is not, or some have not come to it.
    if not made and None in entries.values():
        return text
    return f"{text}, made by {made}" if made else f"{text}, made of other data, or in other ways"


def _made_by(
    count: int, entries: Mapping[int, Entry | None], windows: Mapping[int, Sequence[Entry]]
) -> dict[int, str]:
    """Return the calls that led to an event, by rank; empty where they do not tell ranks apart."""
    there = {rank: entry for rank, entry in entries.items() if entry is not None}
    values = {rank: entry.value for rank, entry in there.items()}
    if len(there) < len(entries):  # who has nothing there cannot be told apart by it
        return {r: _differing(e.before, [e.before]) for r, e in there.items() if e.before}
    if len(set(values.values())) == 1:
        values = {rank: entry.digest for rank, entry in there.items()}
    for at in range(max(1, count - _LOOK_BACK), count + 1):
        calls = {
            rank: next((each.before for each in windows[rank] if each.count == at), ())
            for rank in values
        }
        # What one rank does for itself in between (a log) differs as well, and not between those
        # ranks between which the event differs.
        if _classes(calls) == _classes(values):
            return {rank: _differing(calls[rank], list(calls.values())) for rank in calls}
    return {}


# Events before the first that differs, among which the calls are looked for that made it.
_LOOK_BACK = 16


def _classes(of_ranks: Mapping[int, object]) -> set[frozenset[int]]:
    """Return the sets of ranks that have the same."""
    return {
        frozenset(rank for rank in of_ranks if of_ranks[rank] == value)
        for value in of_ranks.values()
    }


def _differing(own: Sequence[str], everybodys: Sequence[Sequence[str]]) -> str:
    """Return the first calls that are not the same on all ranks, after one that is."""
    alike = [len(set(calls)) == 1 for calls in zip(*everybodys, strict=False)]
    shared = alike.index(False) if False in alike else len(alike)
    if len(set(map(tuple, everybodys))) == 1:
        shared = 0  # nobody did anything else: what there is is told
    shown = own[max(0, shared - 1) : shared + 3]
    return f"{', '.join(shown) or 'no call'}{', …' if shared + 3 < len(own) else ''}"


def _last(window: Sequence[Entry]) -> str:
    if not window:
        return "at no event"
    return f"at event {window[-1].count}: {window[-1].what}, {window[-1].site}"
