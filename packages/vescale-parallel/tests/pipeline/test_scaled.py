"""Loss scaling with stages: gradients that overflow on one stage hold all of them back."""

import pytest
import torch
from stage_runs import make, plan, scaled_steps
from torch import Tensor
from vescale_comm import simulate


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_scalers_skip_the_same_steps(schedule: str):
    expected = scaled_steps(make(), None, {})
    assert [one.item() for one in expected[:3]] == [16.0, 8.0, 16.0]

    def on_a_rank(rank: int, world_size: int) -> list[Tensor]:
        # One microbatch: the same masks as on one device.
        return scaled_steps(make(), plan(schedule, 1), {"pp": 2})

    for found in simulate(2)(on_a_rank):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
