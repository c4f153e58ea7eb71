"""Writes to parts of stored parameters and gradients, under no_grad, do what one device does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vescale_comm import simulate
from vescale_dtensor import DTensor, UnsupportedError
from vescale_parallel import Plan, mesh, parallelize

# Of a weight of 5 x 6 and its gradient, which the second ones write to.
WRITES = """
w[-2:] *= 2 | w.data[3] *= 2 | w[[1, 3]] *= 2 | w.diagonal().add_(1)
w[1] += 1 | w[:, 2] = 5 | w[:, 1:3] *= 3 | w[2:4] = 7 | w[w > 0] = 0 | w[w > 0] *= 2 | w[::2] += 1
w.narrow(0, 1, 3).mul_(2) | w.select(1, 2).add_(1) | w.t().mul_(2) | w.T[1] = 2
w.view(-1)[5:17].fill_(3) | w.data.view(-1)[::2] *= 2 | w.view(2, -1)[0].mul_(2)
w.chunk(2)[1].mul_(2) | w.unbind(0)[2].zero_() | w[1:3].copy_(w[3:5].clone())
w[1:][:, 2:] += 1 | w.detach()[2] *= 2 | w[:, None].squeeze(1)[2] *= 2 | w.permute(1, 0)[2].add_(1)
w[[0, 2], [1, 1]] = 9 | w[torch.tensor([0, 4])] += 1 | w[[0, 1]] = w[[1, 0]]
w[[True] * 4 + [False]] *= 3
w.data[1:4].div_(w.data[1:4].norm()) | torch.nn.init.zeros_(w[1]) | w[2:].clamp_(min=0)
w.index_fill_(0, torch.tensor([1, 2]), 4.0) | w.diagonal(1)[2:].zero_()
b[-2:] *= 2 | b[1] = 3 | b.data[0] = 1 | b[[0, 0]] = 4
w.grad[1] = 0 | w.grad[2:4] *= 2 | w.grad[:, 1] *= 3
w.grad.diagonal().add_(1) | w.grad[[1, 3]] *= 2
"""
LISTED = [one.strip() for line in WRITES.strip().splitlines() for one in line.split("|")]
LAYOUTS = {
    "dp": ({"dp": 4}, {"*": "replicate"}),
    "rows": ({"dp": 2, "tp": 2}, {"*": "tp:0"}),
    "columns": ({"dp": 2, "tp": 2}, {"*weight": "tp:1", "*": "replicate"}),
}


def written(writes, layout=None, level=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    if layout is not None:
        sizes, rules = LAYOUTS[layout]
        parallelize(
            model, mesh(**sizes, device_type="cpu"), Plan(parameters=rules, batch=None, zero=level)
        )
    found = []
    for write in writes:
        model(torch.ones(2, 6)).square().sum().backward()
        w, b = model[0].weight, model[0].bias
        with torch.no_grad():
            exec(write, {"w": w, "b": b, "torch": torch})
            found += [w.detach(), b.detach(), w.grad, model(torch.ones(2, 6))]
        model.zero_grad()
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in found]


def compare(writes, layout, level=3):
    want = written(writes)

    def body(rank, world_size):
        torch.testing.assert_close(written(writes, layout, level), want)

    simulate(4).run(body)


def test_parts():
    compare(LISTED[:4], "rows")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", LISTED)
def test_every_part(write, layout):
    for level in (3, 1):
        compare([write], layout, level)


def test_other_views_that_live_are_named():
    """They would not change; a write that reads or writes several views at once is refused."""
    refused = {
        "w[:2].copy_(w[2:4])": True,
        "torch._foreach_mul_([w[0], w[2]], 2.0)": True,
        "w.as_strided((3,), (1,)).mul_(2)": False,
    }

    def body(rank, world_size):
        for write, others in refused.items():
            with pytest.raises(UnsupportedError, match="a view whose layout forced a copy") as told:
                written([write], "dp")
            assert ("or every other view of it that lives" in str(told.value)) == others

    simulate(4).run(body)
