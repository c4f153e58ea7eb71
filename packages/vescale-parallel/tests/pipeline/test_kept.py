"""A step keeps as many forwards at once as the simulator says, on every rank, at every action;
and what stands for other stages' blocks costs no memory for each of them.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from stage_runs import batch, make, plan
from torch import Tensor
from vescale_comm import simulate
from vescale_parallel import forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._pipeline.run.runner import Runner
from vescale_parallel._pipeline.trace.tensor_specs import Blanks, TensorSpec, spec_of
from vescale_parallel._schedules.actions import Action
from vescale_parallel.schedules import SCHEDULES, make_schedule, simulate_schedule

MICROBATCHES = 4


def on_a_rank(rank: int, world_size: int, name: str, most: list[int]) -> None:
    model = make(blocks=4)
    parallelize(model, make_mesh(device_type="cpu", pp=2), plan(name, MICROBATCHES))
    rows = batch(0, MICROBATCHES)
    forward_backward(model, *rows)  # tried
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


def test_blocks_of_other_stages_share_memory():
    local, used = Blanks.local, []

    def noted(self: Blanks, spec: TensorSpec) -> Tensor:
        used.append(self)
        return local(self, spec)

    with patch.object(Blanks, "local", noted):
        simulate(2)(on_a_rank, "1f1b", [0, 0])
    # On the second stage the table of tokens and two blocks: in the first forward of all, which
    # finds out what there is, then once for the others of a step.
    assert len(used) == 3 + 3 + 3
    assert [len(one._made) for one in used] == [1] * len(used)


def test_what_was_written_to_is_not_shared():
    blanks = Blanks("cpu")
    spec = spec_of(torch.zeros(2, 3))
    first, second = blanks.local(spec), blanks.local(spec)
    assert first is not second
    assert first.data_ptr() == second.data_ptr()
    first[0] = 1.0
    third = blanks.local(spec)
    assert third.isnan().all()
    assert third.data_ptr() != first.data_ptr()
    with torch.inference_mode():
        assert Blanks("cpu").local(spec).isnan().all()
