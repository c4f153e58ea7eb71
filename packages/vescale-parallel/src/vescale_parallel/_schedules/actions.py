"""One step of one rank of a pipeline, and the schedule that is made of them."""

from __future__ import annotations

import csv
import io
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

from vescale_parallel._errors import PlanError

Kind = Literal["F", "B", "I", "W"]
KINDS: Final[dict[str, str]] = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
}
# `re.ASCII`: other digits than 0 to 9 are none to anybody who reads the file. No number of
# thousands of digits, which Python refuses to read.
_WRITTEN: Final = re.compile(r"(\d{1,99})([FBIW])(\d{1,99})", re.ASCII)
# What torch's runtime writes beside computations: what passes, and what FSDP does. Here it follows
# from the computations.
_NOT_COMPUTED: Final = re.compile(
    r"\d+(?:(?:UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)\d*|(?:SEND|WAIT_SEND|RECV)_[FB]\d+)", re.ASCII
)
# Two computations that torch runs side by side.
_OVERLAPPED: Final = re.compile(r"\((.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """What one rank does next. Written as in torch's CSV files: `2F5`.

    Attributes:
        kind: "F" forward; "B" the whole backward; or its halves, "I" gradients of inputs, which
            the stage before waits for, and "W" gradients of weights, for which nobody does.
        stage: index of the stage, from the input on.
        microbatch: index of the microbatch.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str` writes.

        Raises:
            PlanError: the text is no action.
        """
        found = _WRITTEN.fullmatch(text.strip())
        if found is None:
            raise PlanError(
                f"{text[:80]!r} is no action of a schedule: write stage, F, B, I or W, and "
                "microbatch, as 2F5."
            )
        kind: Kind = found[2]  # type: ignore[assignment]
        return cls(kind, int(found[1]), int(found[3]))


class Schedule(NamedTuple):
    """The actions of each rank, in order.

    Attributes:
        name: for tables.
        ranks: for each pipeline rank its actions.
        stage_ranks: for each stage the rank that has it.
        microbatches: number of microbatches.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...]
    microbatches: int

    @property
    def stages(self) -> int:
        """Number of stages, over all ranks."""
        return len(self.stage_ranks)

    def to_csv(self) -> str:
        """Write one row for each rank, as torch's pipelining reads it."""
        text = io.StringIO()
        # Not the end of lines of Python's csv, which has a carriage return.
        csv.writer(text, lineterminator="\n").writerows([*map(str, row)] for row in self.ranks)
        return text.getvalue()


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Read a schedule of one row for each rank, as torch's pipelining writes and reads it.

    Empty fields are pauses, which say nothing. Of torch's other actions those of pairs
    (`(0F4;3B0)OVERLAP_F_B`) come one by one, and what is no computation (`0SEND_F1`, `0UNSHARD`) is
    left out: it follows from the computations.

    Raises:
        PlanError: the text is no CSV, a field is no action, or a stage is on two ranks or on none.
    """
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise PlanError(f"schedule {name}: it is no CSV: {error}.") from error
    # Empty rows at the end are blank lines, and not ranks.
    while rows and not any(field.strip() for field in rows[-1]):
        rows.pop()
    return schedule_of(name, [[a for f in row for a in _computations(f.strip())] for row in rows])


def _computations(field: str) -> list[Action]:
    """The actions that a field of a CSV stands for."""
    pair = _OVERLAPPED.fullmatch(field)
    parts = pair[1].split(";") if pair else [field]
    return [Action.parse(p) for p in parts if p and not _NOT_COMPUTED.fullmatch(p)]


def action_of(value: object) -> Action:
    """Return what a user gives as an action: one, its text, or kind, stage and microbatch.

    Raises:
        PlanError: it is none of them, or a number is negative.
    """
    if isinstance(value, str):
        return Action.parse(value)
    given: Any = value
    try:
        kind, stage, microbatch = given
        found = Action(kind, operator.index(stage), operator.index(microbatch))
        if kind in KINDS and min(found.stage, found.microbatch) >= 0:
            return found
    except (TypeError, ValueError):
        pass  # it has other parts: the same error
    raise PlanError(
        f"{value!r} is no action of a schedule: give an Action, its text as '2F5', or kind (F, B, "
        "I or W), stage and microbatch as ('F', 2, 5)."
    )


def schedule_of(name: str, ranks: Sequence[Iterable[Action]]) -> Schedule:
    """Make a schedule of actions by rank; stages and microbatches follow from them.

    Args:
        name: for tables.
        ranks: for each rank its actions, or their texts (`2F5`); None is a pause, which says
            nothing.

    Raises:
        PlanError: something is no action, a stage is on two ranks, or none has it.
    """
    actions = tuple(tuple(action_of(one) for one in each if one is not None) for each in ranks)
    places: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for action in row:
            if places.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    f"schedule {name}: stage {action.stage} is on ranks {places[action.stage]} "
                    f"and {rank}. A stage has one rank."
                )
    # Of so many numbers one is missing, or they are those from 0 on: no table of the largest one.
    missing = next(s for s in range(len(places) + 1) if s not in places)
    if missing < max(len(places), 1):
        raise PlanError(f"schedule {name}: no rank has stage {missing}.")
    most = max(action.microbatch for row in actions for action in row)
    # So with microbatches: what computes with a schedule makes tables of their number.
    if most >= sum(map(len, actions)):
        raise PlanError(
            f"schedule {name}: it has microbatch {most}, and {sum(map(len, actions))} actions. "
            "Microbatches are numbered from 0 on, each with a forward and a backward."
        )
    return Schedule(name, actions, tuple(places[s] for s in sorted(places)), most + 1)


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages in turn: rank 0 has stages 0, `ranks`, 2 · `ranks` and so on."""
    return tuple(range(ranks)) * chunks


def folded(ranks: int) -> tuple[int, ...]:
    """Two stages a rank, in a V: the first rank has the first stage and the last one."""
    return (*range(ranks), *reversed(range(ranks)))


def check_counts(name: str, ranks: int, microbatches: int, chunks: int = 1) -> None:
    """Refuse counts of which there is no schedule.

    Raises:
        PlanError: one of them is not positive.
    """
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise PlanError(f"schedule {name}: {what} is {number}; there has to be at least one.")
