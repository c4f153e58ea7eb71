"""Loss scaling with stages: gradients that overflow on one stage hold all of them back."""

import pytest
import torch
from stage_runs import batch, make, plan, whole
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh


def scaled_steps(model: nn.Module, how: Plan | None, sizes: dict[str, int]) -> list[Tensor]:
    """Three steps; in the second one a parameter of the first stage gets an infinite gradient."""
    if how is not None:
        parallelize(model, make_mesh(device_type="cpu", **sizes), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(torch.zeros(()))  # on every rank: only one has the loss
    told = []
    for step in range(3):
        torch.manual_seed(step)
        forward_backward(model, *batch(step), loss=scaler.scale)
        if step == 1:
            gradient = model.get_parameter("blocks.0.mlp.up.weight").grad
            assert gradient is not None
            gradient.mul_(float("inf"))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append(torch.tensor(scaler.get_scale()))
    return [*told, *(whole(one).detach() for one in model.parameters())]


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
