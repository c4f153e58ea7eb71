"""All schedules for the same ranks and microbatches compared, and the best that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from vescale_parallel._errors import PlanError
from vescale_parallel._schedules import greedy, orders
from vescale_parallel._schedules.actions import Schedule, check_counts
from vescale_parallel._schedules.timeline import (
    EQUAL,
    StageTimes,
    Timeline,
    require_amount,
    simulate_schedule,
)


class Kind(NamedTuple):
    """A kind of schedule.

    Attributes:
        make: from ranks and microbatches; for those with free chunks, from chunks as well.
        chunks: stages a rank; 0 where the caller says how many.
        by_times: whether it follows from the times of stages, which it takes as a third argument.
    """

    make: Callable[..., Schedule]
    chunks: int = 1
    by_times: bool = False


SCHEDULES: Final[Mapping[str, Kind]] = {
    "gpipe": Kind(orders.gpipe),
    "1f1b": Kind(orders.one_f_one_b),
    "interleaved": Kind(orders.interleaved, chunks=0),
    "zb-h1": Kind(orders.zb_h1),
    "zb-greedy": Kind(greedy.zb_greedy, by_times=True),
    "zbv": Kind(orders.zbv, chunks=2),
    "dualpipev": Kind(orders.dualpipev, chunks=2),
}
"""Every kind of schedule, by the name that a plan says."""


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int = 2,
    times: StageTimes | Sequence[StageTimes] = EQUAL,
) -> Schedule:
    """Make the schedule of that name.

    Args:
        name: a key of `SCHEDULES`.
        ranks: number of pipeline ranks.
        microbatches: number of microbatches.
        chunks: stages of each rank, for "interleaved"; others have one, or two.
        times: of the stages, for "zb-greedy".

    Raises:
        PlanError: there is none of that name, or none for these counts.
    """
    kind = SCHEDULES.get(name)
    if kind is None:
        raise PlanError(f"there is no schedule {name!r}; there are: {', '.join(SCHEDULES)}.")
    if kind.by_times:
        return kind.make(ranks, microbatches, times)
    return (
        kind.make(ranks, microbatches, chunks)
        if not kind.chunks
        else kind.make(ranks, microbatches)
    )


def compare_schedules(
    ranks: int,
    microbatches: int,
    *,
    chunks: int = 2,
    times: StageTimes | Sequence[StageTimes] = EQUAL,
    send: float = 0.0,
) -> dict[str, Timeline | str]:
    """Simulate every schedule on one model: the same work a rank, whatever its number of stages.

    Args:
        ranks: number of pipeline ranks.
        microbatches: number of microbatches.
        chunks: stages of each rank, for "interleaved".
        times: of what one rank has of the model, or of each rank's; divided among its stages.
        send: how long a message is under way.

    Returns:
        By name the timeline, or why there is none.

    Raises:
        PlanError: a count is not positive, there are not as many times as ranks, or `send` is
            negative or no number.
    """
    # Before any is made: what no schedule can have is the caller's error, and not a row for each.
    check_counts("of any kind", ranks, microbatches, chunks)
    require_amount("schedules: send", send)
    each = (times,) * ranks if isinstance(times, StageTimes) else tuple(times)
    if len(each) != ranks:
        raise PlanError(f"schedules: {len(each)} times for {ranks} ranks.")
    found: dict[str, Timeline | str] = {}
    for name in SCHEDULES:
        try:
            made = make_schedule(name, ranks, microbatches, chunks=chunks, times=each)
        except PlanError as error:
            found[name] = str(error)
            continue
        share = made.stages // ranks
        # The same model for all: a rank with two stages has half of its part in each.
        of_stages = [_divided(each[rank], share) for rank in made.stage_ranks]
        found[name] = simulate_schedule(made, of_stages, send=send)
    return found


def _divided(times: StageTimes, parts: int) -> StageTimes:
    return StageTimes(*(value / parts for value in vars(times).values()))


def best_schedule(
    ranks: int,
    microbatches: int,
    *,
    memory: float | None = None,
    chunks: int = 2,
    times: StageTimes | Sequence[StageTimes] = EQUAL,
    send: float = 0.0,
) -> Timeline:
    """Return the fastest schedule of which no rank keeps more than `memory`.

    Of those that take as long, the one that keeps less; then the one that sends less.

    Raises:
        PlanError: none fits; it names the one that keeps least.
    """
    every = compare_schedules(ranks, microbatches, chunks=chunks, times=times, send=send)
    there = [each for each in every.values() if isinstance(each, Timeline)]
    fitting = [each for each in there if memory is None or each.peak <= memory]
    if not fitting:
        least = min(there, key=lambda each: each.peak)
        raise PlanError(
            f"no schedule for {ranks} ranks and {microbatches} microbatches keeps at most "
            f"{memory:g}: {least.schedule.name} keeps least, {least.peak:g}. Make microbatches "
            "smaller, or compute blocks again in backward."
        )
    return min(fitting, key=lambda t: (_rounded(t.seconds), _rounded(t.peak), t.messages))


def _rounded(value: float) -> float:
    """To nine digits, in any unit: sums of equal times in another order differ in their last."""
    return float(f"{value:.9g}")
