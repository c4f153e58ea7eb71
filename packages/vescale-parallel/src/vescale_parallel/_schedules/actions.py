"""One step of one rank of a pipeline, and the schedule that is made of them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from vescale_parallel._errors import PlanError

Kind = Literal["F", "B", "I", "W"]
KINDS: Final[dict[str, str]] = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
}
_WRITTEN: Final = re.compile(r"(\d+)([FBIW])(\d+)")


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
                f"{text!r} is no action of a schedule: write stage, F, B, I or W, and microbatch, "
                "as 2F5."
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
    """Read a schedule of one row for each rank; empty fields are pauses, which say nothing.

    Raises:
        PlanError: a field is no action, or a stage is on two ranks or on none.
    """
    rows = list(csv.reader(io.StringIO(text)))
    return schedule_of(name, [[Action.parse(f) for f in row if f.strip()] for row in rows])


def schedule_of(name: str, ranks: Sequence[Iterable[Action]]) -> Schedule:
    """Make a schedule of actions by rank; stages and microbatches follow from them.

    Raises:
        PlanError: a stage is on two ranks, or none has it.
    """
    actions = tuple(tuple(each) for each in ranks)
    places: dict[int, int] = {}
    for rank, row in enumerate(actions):
        for action in row:
            if places.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    f"schedule {name}: stage {action.stage} is on ranks {places[action.stage]} "
                    f"and {rank}. A stage has one rank."
                )
    missing = sorted(set(range(max(places, default=-1) + 1)) - places.keys())
    if missing or not places:
        raise PlanError(f"schedule {name}: no rank has stage {missing[0] if missing else 0}.")
    most = max(action.microbatch for row in actions for action in row)
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
