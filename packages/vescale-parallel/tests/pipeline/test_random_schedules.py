"""Any schedule that the validator accepts runs, and gives one device's numbers.

Stages lie on any rank, microbatches come in any order, and backwards whole or in halves.
"""

import random

import pytest
from stage_runs import plan, train
from vescale_comm import simulate
from vescale_parallel.schedules import Action, Schedule, check_schedule, schedule_of

BLOCKS = 4


def any_schedule(seed: int, ranks: int, microbatches: int) -> Schedule:
    """A schedule by chance: whatever can come next, on any rank, until all is done."""
    draw = random.Random(seed)
    stages = draw.randint(ranks, BLOCKS)
    places = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(places)
    # Of each pair whether its backward comes whole.
    whole = {(s, m): draw.random() < 0.5 for s in range(stages) for m in range(microbatches)}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    can = [Action("F", 0, m) for m in range(microbatches)]
    while can:
        action = can.pop(draw.randrange(len(can)))
        kind, stage, microbatch = action
        rows[places[stage]].append(action)
        if kind == "F" and stage + 1 < stages:
            can.append(Action("F", stage + 1, microbatch))
        if kind == "I":
            can.append(Action("W", stage, microbatch))
        back = stage - 1 if kind in "BI" else stage if (kind, stage) == ("F", stages - 1) else -1
        if back >= 0:
            can.append(Action("B" if whole[back, microbatch] else "I", back, microbatch))
    return schedule_of("any", rows)


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 3}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_it_runs(seed: int, sizes: dict[str, int]):
    schedule = any_schedule(seed, sizes["pp"], 4)
    check_schedule(schedule)
    world = sizes["pp"] * sizes.get("dp", 1)
    simulate(world)(train, sizes, plan(schedule.to_csv(), 4), bool(seed % 2), 7 + seed % 2)
