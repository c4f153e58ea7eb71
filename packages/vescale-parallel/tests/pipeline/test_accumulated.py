"""Gradients that are there before a step are added to, whatever was done to them meanwhile."""

import pytest
import torch
from stage_runs import accumulate, batch, make, plan, require_gradients
from torch import nn
from vescale_comm import simulate
from vescale_parallel import forward_backward, parallelize
from vescale_parallel import mesh as make_mesh


def accumulated(rank: int, world_size: int, sizes: dict[str, int], schedule: str, how: str) -> None:
    model, plain = make(True), make(True)
    parallelize(model, make_mesh(device_type="cpu", **sizes), plan(schedule, 2))
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    for step in range(3):
        torch.manual_seed(step)
        accumulate(plain, 2, *batch(step))
        torch.manual_seed(step)
        forward_backward(model, *batch(step))
        both = [p for pair in pairs for p in pair]
        if how == "assigned" and not step:
            for one in both:
                one.grad = torch.ones_like(one)
        elif how == "scaled":
            for one in both:
                one.grad.mul_(2)
        elif how == "clipped":
            for one in (model, plain):
                nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        elif how == "some dropped":
            pairs[0][0].grad = pairs[0][1].grad = None
    require_gradients(model, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["as it is", "assigned", "scaled", "clipped", "some dropped"])
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_gradients_go_on_from_what_is_there(sizes: dict[str, int], how: str):
    """Also those of tied parameters, which several stages add to."""
    schedule = {"assigned": "zb-h1", "clipped": "zbv"}.get(how, "1f1b")
    simulate(torch.Size(sizes.values()).numel())(accumulated, sizes, schedule, how)
