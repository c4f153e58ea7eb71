"""Estimates a step in stages: each rank's part by the cost model, and its schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from vescale_parallel._cost import Cost, Piece, Precision, StepPlace, Transfer, Workload, estimate
from vescale_parallel._cost import waited as waited_for
from vescale_parallel._pipeline.plan.rules import AXIS
from vescale_parallel._pipeline.plan.split import Split
from vescale_parallel._schedules.actions import Schedule
from vescale_parallel._schedules.timeline import StageTimes, simulate_schedule


def staged_cost(
    pieces: Sequence[Piece],
    split: Split,
    scene: StepPlace,
    work: Workload,
    precision: Precision | None = None,
) -> Cost:
    """Return the cost of a step in stages, for the rank that holds most.

    Stages of one rank count alike. Messages run beside computation; collectives of data
    parallelism hide behind it as far as in a step without stages.

    Args:
        pieces: the parameters of all stages.
        split: stages and schedule.
        scene: mesh and cluster.
        work: of the whole step.
        precision: bytes of an element.
    """
    precision, schedule = precision or Precision(), split.schedule
    work = replace(work, turns=schedule.microbatches)
    ranks = range(len(schedule.ranks))
    parts = [_of_rank(pieces, split.owners, schedule, rank) for rank in ranks]
    costs = [estimate(part, scene, work, precision) for part in parts]
    message = _message(pieces, split, scene, work, precision)
    busy = [_busy(cost, part, scene, work) for cost, part in zip(costs, parts, strict=True)]
    times = [busy[rank].times(schedule, rank) for rank in schedule.stage_ranks]
    timeline = simulate_schedule(schedule, times, send=scene.seconds(message))
    # An estimate is of one microbatch. How many of them are there at once is up to the schedule.
    memories = [
        replace(cost.memory, activations=kept)
        for cost, kept in zip(costs, timeline.peaks, strict=True)
    ]
    most = max(ranks, key=lambda rank: memories[rank].total)
    # A timeline counts the messages of all ranks: a mean, rounded up.
    sends = replace(message, count=-(-timeline.messages // len(ranks)))
    sent = (sends, sends.sent(len(ranks)), scene.seconds(sends))
    compute = max(one.compute for one in costs)
    return replace(
        costs[most],
        memory=memories[most],
        # A rank's part, of all alike: so `utilization` is that of all ranks together.
        flops=sum(one.flops for one in costs) / len(ranks),
        compute=compute,
        update=max(one.update for one in costs),
        transfers=(*costs[most].transfers, *([sent] if timeline.messages else [])),
        # All of the time in which the busiest rank does not compute: the bubble, waits within
        # stages (which are part of the times of actions), and what no action hides.
        exposed=timeline.seconds - compute + max(one.waits for one in busy),
        bubble=timeline.bubble,
    )


class _Busy(NamedTuple):
    """What a rank does.

    Attributes:
        seconds: that it computes or waits within a stage, in all microbatches.
        waits: seconds for what is not within a stage.
        again: the part of the model's forward that is computed again.
        kept: bytes of a microbatch from forward to backward.
    """

    seconds: float
    waits: float
    again: float
    kept: float

    def times(self, schedule: Schedule, rank: int) -> StageTimes:
        """Of one stage of this rank and one microbatch."""
        stages = schedule.stage_ranks.count(rank)
        # A forward, two halves of a backward as long as a forward each, and what is computed again.
        each = self.seconds / schedule.microbatches / stages / (3 + self.again)
        kept = self.kept / stages
        return StageTimes(each, each * (1 + self.again), each, kept, kept)


def _busy(cost: Cost, pieces: Sequence[Piece], scene: StepPlace, work: Workload) -> _Busy:
    within = [one for one in cost.transfers if not _is_of_parameters(one[0], scene)]
    outside = [one for one in cost.transfers if _is_of_parameters(one[0], scene)]
    cluster = scene.cluster
    # Nothing to hide behind: what waits within a stage.
    seconds = cost.compute + waited_for(within, 0.0)
    model = cost.flops / (cluster.flops * cluster.efficiency)
    # Forward is a third of the model's products and backward two: what is computed beyond those, in
    # forwards.
    again = 3 * max(cost.compute / model - 1, 0.0) if model else 0.0
    waits = waited_for(outside, cost.compute * cluster.overlap)
    return _Busy(seconds, waits, again, cost.memory.activations)


def _is_of_parameters(one: Transfer, scene: StepPlace) -> bool:
    return one.axis == scene.over or one.axis in scene.batch


def _of_rank(
    pieces: Sequence[Piece], owners: Mapping[str, int | None], schedule: Schedule, rank: int
) -> list[Piece]:
    """Return the parameters of a rank; those on every stage are multiplied with on the last."""
    is_last = schedule.stage_ranks[-1] == rank
    own = [one for one in pieces if owners[one.name] in (None, rank)]
    return [
        one
        if owners[one.name] == rank or is_last or not one.multiplied
        else replace(one, multiplied=False, looked_up=True)
        for one in own
    ]


def _message(
    pieces: Sequence[Piece], split: Split, scene: StepPlace, work: Workload, precision: Precision
) -> Transfer:
    """Return what a stage sends of one microbatch: as wide as its first norm or matrix takes it."""
    first = split.blocks[0]
    inside = [one for one in pieces if one.name.startswith(f"{first}.") and one.shape]
    width = inside[0].shape[-1] if inside else 1
    shards = 1
    for axis in scene.batch:
        shards *= scene.mesh.get(axis, 1)
    tokens = work.tokens / shards / work.turns
    return Transfer(AXIS, "send", tokens * width * precision.compute, hides=True)
