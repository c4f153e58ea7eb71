"""Schedules that are written down: pure functions of ranks, microbatches and chunks.

Sources: GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503), interleaved 1F1B
(arXiv 2104.04473), ZBV (arXiv 2405.15362), DualPipeV (DeepSeek, 2025).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator

from vescale_parallel._errors import PlanError
from vescale_parallel._schedules.actions import (
    Action,
    Kind,
    Schedule,
    check_counts,
    folded,
    looped,
)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: simple, and every microbatch is kept until the end.

    Raises:
        PlanError: a count is not positive.
    """
    check_counts("gpipe", ranks, microbatches)
    each = range(microbatches)
    rows = tuple(
        (*(Action("F", r, m) for m in each), *(Action("B", r, m) for m in each))
        for r in range(ranks)
    )
    return Schedule("gpipe", rows, looped(ranks, 1), microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward: the bubble of GPipe, with at most `ranks` microbatches kept.

    Raises:
        PlanError: a count is not positive.
    """
    check_counts("1f1b", ranks, microbatches)
    rows = []
    for rank in range(ranks):
        forwards = [Action("F", rank, m) for m in range(microbatches)]
        backwards = [Action("B", rank, m) for m in range(microbatches)]
        # As many forwards first as there are ranks behind this one.
        rows.append(_alternating(forwards, backwards, ranks - rank - 1))
    return Schedule("1f1b", tuple(rows), looped(ranks, 1), microbatches)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with split backwards: a third of its bubble, and no more memory.

    Gradients of weights wait until what is kept would be more than 1F1B keeps on the first rank.

    Raises:
        PlanError: a count is not positive.
    """
    check_counts("zb-h1", ranks, microbatches)
    rows = []
    for rank, whole in enumerate(one_f_one_b(ranks, microbatches).ranks):
        row: list[Action] = []
        left: deque[int] = deque()
        for kind, _, microbatch in whole:
            row.append(Action("I" if kind == "B" else kind, rank, microbatch))
            if kind == "B":
                left.append(microbatch)
                # Rank r of 1F1B keeps r microbatches fewer than the first: so many may wait for
                # their gradients of weights.
                if len(left) > rank:
                    row.append(Action("W", rank, left.popleft()))
        row += [Action("W", rank, microbatch) for microbatch in left]
        rows.append(tuple(row))
    return Schedule("zb-h1", tuple(rows), looped(ranks, 1), microbatches)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with several stages a rank: a bubble `chunks` times smaller, for as many messages more.

    Microbatches pass in groups, as many as there are ranks, one chunk after the other.

    Raises:
        PlanError: a count is not positive, or groups do not come out even.
    """
    check_counts("interleaved", ranks, microbatches, chunks)
    # As torch has it: the number of groups divides, or there is one.
    groups = max(1, microbatches // ranks)
    if microbatches % groups:
        raise PlanError(
            f"schedule interleaved: {microbatches} microbatches do not make {groups} equal groups "
            f"for {ranks} ranks. Take a multiple of {ranks}, or fewer than {2 * ranks}."
        )
    size = microbatches // groups
    rows = []
    for rank in range(ranks):
        forwards = list(_grouped("F", rank, ranks, range(chunks), groups, size))
        backwards = list(_grouped("B", rank, ranks, reversed(range(chunks)), groups, size))
        # All chunks but the last of one group, and two for each rank behind: there and back.
        first = min((chunks - 1) * size + 2 * (ranks - 1 - rank), len(forwards))
        rows.append(_alternating(forwards, backwards, first))
    return Schedule("interleaved", tuple(rows), looped(ranks, chunks), microbatches)


def _alternating(forwards: list[Action], backwards: list[Action], first: int) -> tuple[Action, ...]:
    """Some forwards, then a forward and a backward in turn, then the backwards that are left."""
    # As long as there are forwards; the backwards that they leave over come behind.
    pairs = zip(forwards[first:], backwards, strict=False)
    rest = backwards[max(0, len(forwards) - first) :]
    return (*forwards[:first], *(action for pair in pairs for action in pair), *rest)


def _grouped(
    kind: Kind, rank: int, ranks: int, chunks: range | Iterator[int], groups: int, size: int
) -> Iterator[Action]:
    order = list(chunks)
    for group in range(groups):
        for chunk in order:
            for index in range(size):
                yield Action(kind, chunk * ranks + rank, group * size + index)


class _FoldedRow:
    """Writes the actions of one rank of a V: of each kind and chunk the next microbatch.

    Args:
        rank: the rank.
        ranks: number of ranks.
        microbatches: those from there on are left out: they stand for empty places.
    """

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self.actions: list[Action] = []
        # By kind and chunk; "I" counts whole backwards, too, which come in the same order.
        self.done: Counter[str] = Counter()
        # Chunks and microbatches whose gradients of weights are left, the oldest first.
        self.left: list[tuple[str, int]] = []
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._most = microbatches

    def add(self, *steps: str) -> None:
        """Add actions as `F0`: the kind, and the chunk (0 on the way in, 1 on the way back)."""
        for step in steps:
            kind, chunk = step[0], step[1]
            if kind == "W":
                # The oldest of that chunk: it has kept its activations longest.
                place = next(i for i, (c, _) in enumerate(self.left) if c == chunk)
                microbatch = self.left.pop(place)[1]
            else:
                counted = f"{'F' if kind == 'F' else 'I'}{chunk}"
                microbatch = self.done[counted]
                self.done[counted] += 1
            if kind == "I":
                self.left.append((chunk, microbatch))
            if microbatch < self._most:
                known: Kind = kind  # type: ignore[assignment]
                self.actions.append(Action(known, self._stages[int(chunk)], microbatch))

    def add_oldest_weights(self) -> None:
        """Add the gradients of weights that have waited longest."""
        self.add(f"W{self.left[0][0]}")


def zbv(ranks: int, microbatches: int) -> Schedule:
    """ZBV: two stages a rank in a V, and split backwards; no bubble where F, I and W take as long.

    Raises:
        PlanError: a count is not positive.
    """
    return _folded_schedule("zbv", ranks, microbatches, _zbv_rank)


def _zbv_rank(row: _FoldedRow, rank: int, ranks: int, microbatches: int) -> None:
    # The steady part needs so many; with fewer, those too many are empty places.
    places = max(2 * ranks - 1, microbatches)
    row.add(*["F0"] * (2 * (ranks - rank) - 1))
    row.add(*["F1", "F0"] * rank)
    row.add(*["F1", "I1", "W1"] * (ranks - rank))
    while row.done["F1"] < row.done["F0"] or row.done["F0"] < places:
        if row.done["F0"] < places:
            row.add("F0")
        row.add("I0", "W0", "F1", "I1", "W1")
    row.add(*["I0", "I1"] * rank)
    row.add(*["I0", "W0"] * (ranks - rank))
    # Those of the second chunk first.
    for chunk in "10":
        row.add(*[f"W{chunk}" for c, _ in row.left if c == chunk])


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: a V whose forwards and backwards stand side by side, so that they can overlap.

    Raises:
        PlanError: a count is not positive, or there are fewer than 2 · `ranks` microbatches.
    """
    if microbatches < 2 * ranks:
        raise PlanError(
            f"schedule dualpipev: {microbatches} microbatches for {ranks} ranks; it needs at least "
            f"{2 * ranks}."
        )
    return _folded_schedule("dualpipev", ranks, microbatches, _dualpipev_rank)


def _dualpipev_rank(row: _FoldedRow, rank: int, ranks: int, microbatches: int) -> None:
    behind = ranks - rank - 1
    row.add(*["F0"] * (2 * behind))
    row.add(*["F0", "F1"] * (rank + 1))
    row.add(*["I1", "W1", "F1"] * behind)
    row.add(*["F0", "B1", "F1", "B0"] * (microbatches - 2 * ranks + rank + 1))
    row.add(*["B1", "F1", "B0"] * behind)
    # From the middle on backwards are split, so that the last ones do not wait for weights.
    whole = rank + 1
    for index in range(2 * (rank + 1)):
        chunk = "10"[index % 2]
        row.add(f"B{chunk}" if index < whole else f"I{chunk}")
    for _ in range(behind):
        row.add_oldest_weights()
        row.add("I0")
    while row.left:
        row.add_oldest_weights()


def _folded_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    write: Callable[[_FoldedRow, int, int, int], None],
) -> Schedule:
    check_counts(name, ranks, microbatches)
    rows = []
    for rank in range(ranks):
        row = _FoldedRow(rank, ranks, microbatches)
        write(row, rank, ranks, microbatches)
        rows.append(tuple(row.actions))
    return Schedule(name, tuple(rows), folded(ranks), microbatches)
