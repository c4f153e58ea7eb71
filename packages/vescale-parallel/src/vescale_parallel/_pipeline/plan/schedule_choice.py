"""The schedule that a plan asks for: by name, a user's own, or the best of all.

`"auto"` decides twice. Where stages lie follows from the kind of schedule, so that is decided
before anything has run, by equal times of all stages. Which of the schedules for these places runs
is decided by times and bytes that were measured, see `measurements`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vescale_parallel._common.messages import count, did_you_mean
from vescale_parallel._errors import PlanError
from vescale_parallel._schedules.actions import Schedule, from_csv, schedule_of
from vescale_parallel._schedules.check import check_schedule
from vescale_parallel._schedules.choice import SCHEDULES, compare_schedules, make_schedule
from vescale_parallel._schedules.timeline import StageTimes, Timeline, simulate_schedule

AUTO: Final = "auto"
Own = Callable[[int, int], Any]
"""A user's function: ranks and microbatches to a `Schedule`, or to the actions of each rank."""


def require_text(plan: Any) -> Any:
    """Return a plan that can be written as text: a `Schedule` as the text of its CSV.

    Raises:
        PlanError: the schedule of its pipeline is a function.
    """
    if plan.pipeline is not None and callable(plan.pipeline.schedule):
        raise PlanError(
            "a plan whose schedule is a function cannot be written: let its schedule be the CSV of "
            "what the function returns (Schedule.to_csv())."
        )
    if plan.pipeline is not None and isinstance(plan.pipeline.schedule, Schedule):
        text = plan.pipeline.schedule.to_csv()
        return replace(plan, pipeline=replace(plan.pipeline, schedule=text))
    return plan


def read_schedule(said: Any) -> Any:
    """Return the schedule of a plan, of a CSV file its text.

    Raises:
        PlanError: there is no such file.
    """
    if not (isinstance(said, str | Path) and str(said).endswith(".csv")):
        return said
    try:
        return Path(said).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"plan pipeline.schedule: '{said}' cannot be read: {error}") from error


def parse_schedule(given: object) -> str | Schedule | Own:
    """Read the word `schedule`.

    Raises:
        PlanError: it is no name, and nothing that can be read as one's own schedule.
    """
    if isinstance(given, Schedule):
        return given
    # No name has either: it is the text of a CSV.
    if isinstance(given, str) and ("," in given or "\n" in given):
        return from_csv(given)
    if isinstance(given, str) and (given == AUTO or given in SCHEDULES):
        return given
    if callable(given):
        return given
    near = did_you_mean(str(given), [*SCHEDULES, AUTO])
    raise PlanError(
        f"plan pipeline.schedule: no schedule {given!r}.{near} There are {', '.join(SCHEDULES)}, "
        "auto, a CSV file (a name that ends in .csv, or its text), and functions of ranks and "
        "microbatches."
    )


def schedule_for(
    asked: str | Schedule | Own, ranks: int, microbatches: int, chunks: int, blocks: int
) -> Schedule:
    """Return the checked schedule of a step.

    Args:
        asked: what `parse_schedule` returned.
        ranks: extent of the axis of stages.
        microbatches: how many a batch makes.
        chunks: stages a rank, for "interleaved", and at most for "auto".
        blocks: how many blocks the model has: a stage needs one.

    Raises:
        PlanError: there is none for these counts, or a user's own is wrong.
    """
    if asked == AUTO:
        return _best_placed(ranks, microbatches, chunks, blocks)
    if isinstance(asked, str):
        made = make_schedule(asked, ranks, microbatches, chunks=chunks)
    else:
        made = asked if isinstance(asked, Schedule) else _called_own(asked, ranks, microbatches)
        _require_counts(made, ranks, microbatches)
    check_schedule(made)
    return made


def _called_own(own: Own, ranks: int, microbatches: int) -> Schedule:
    found = own(ranks, microbatches)
    name = getattr(own, "__name__", type(own).__name__)
    if isinstance(found, Schedule):
        return found
    try:
        # Generators are read here, so that their own errors are not taken for this one.
        rows = [[*row] for row in found]
    except TypeError as error:
        raise PlanError(
            f"schedule {name}({ranks}, {microbatches}) returned {type(found).__name__}: return a "
            "vescale_parallel.schedules.Schedule, or for each rank its actions, as ['0F0', '0B0']."
        ) from error
    return schedule_of(name, rows)


def _require_counts(made: Schedule, ranks: int, microbatches: int) -> None:
    idle = set(range(ranks)) - set(made.stage_ranks)
    if len(made.ranks) != ranks or idle or made.microbatches != microbatches:
        raise PlanError(
            f"schedule {made.name} has {count(len(made.ranks), 'rank')}, {made.microbatches} "
            f"microbatches, and stages on the ranks {sorted(set(made.stage_ranks))}; the plan and "
            f"the mesh ask for {count(ranks, 'rank')} with a stage each, and {microbatches} "
            "microbatches."
        )


def _best_placed(ranks: int, microbatches: int, chunks: int, blocks: int) -> Schedule:
    """The fastest where all stages take as long, of those that have a block for each stage."""
    found = compare_schedules(ranks, microbatches, chunks=chunks).values()
    most = ranks * chunks
    fitting = [
        one
        for one in found
        if isinstance(one, Timeline) and one.schedule.stages <= min(blocks, most)
    ]
    if not fitting:
        return make_schedule("1f1b", ranks, microbatches)  # whose error says what is missing
    return min(fitting, key=_order).schedule


def best_in_place(
    schedule: Schedule, times: Sequence[StageTimes], memory: float | None
) -> Timeline:
    """Return the fastest schedule for the same places of stages.

    Args:
        schedule: one for these places.
        times: measured, of each stage; with bytes.
        memory: bytes that a rank may keep from forwards to backwards.

    Raises:
        PlanError: none keeps as little as that; it names the one that keeps least.
    """
    ranks, microbatches = len(schedule.ranks), schedule.microbatches
    found = []
    for name in SCHEDULES:
        try:
            chunks = schedule.stages // ranks
            made = make_schedule(name, ranks, microbatches, chunks=chunks, times=times)
        # Not every schedule exists for every number. The one that was measured does, so that
        # `found` is never empty.
        except PlanError:
            continue
        if made.stage_ranks == schedule.stage_ranks:
            found.append(simulate_schedule(made, times))
    fitting = [one for one in found if memory is None or one.peak <= memory]
    if not fitting:
        least = min(found, key=lambda one: one.peak)
        raise PlanError(
            f"schedule 'auto': no schedule of {count(schedule.stages, 'stage')} keeps at most "
            f"{memory:,.0f} bytes; {least.schedule.name} keeps least, {least.peak:,.0f}. Make "
            "microbatches smaller, compute blocks again (checkpoint=), or take other chunks=."
        )
    return min(fitting, key=_order)


def _order(one: Timeline) -> tuple[float, float, int]:
    # Rounded: sums of equal times in another order differ in their last bits.
    return float(f"{one.seconds:.6g}"), one.peak, one.messages
