"""A step keeps as many forwards at once as the simulator says, on every rank, at every action."""

from typing import Any
from unittest.mock import patch

import pytest
from stage_runs import batch, make, plan
from vescale_comm import simulate
from vescale_parallel import forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._pipeline.runner import Runner
from vescale_parallel._schedules.actions import Action
from vescale_parallel.schedules import SCHEDULES, make_schedule, simulate_schedule

MICROBATCHES = 4


def on_a_rank(rank: int, world_size: int, name: str, most: list[int]) -> None:
    model = make(blocks=4)
    parallelize(model, make_mesh(device_type="cpu", pp=2), plan(name, MICROBATCHES))
    rows = batch(0, MICROBATCHES)
    forward_backward(model, *rows)  # rehearsed
    most[rank] = 0
    forward_backward(model, *rows)


@pytest.mark.parametrize("name", SCHEDULES)
def test_as_many_forwards_are_kept(name: str):
    act, most = Runner._act, [0, 0]

    def counted(self: Any, action: Action, **words: Any) -> None:
        act(self, action, **words)
        held = len(self._kept) + len(self._halves)
        # What a backward lets go of is counted until it ends.
        held += action.kind in "BW"
        rank = self._scene.rank
        most[rank] = max(most[rank], held)

    with patch.object(Runner, "_act", counted):
        simulate(2)(on_a_rank, name, most)
    paper = simulate_schedule(make_schedule(name, 2, MICROBATCHES, chunks=2))
    assert most == [int(one) for one in paper.peaks]
