"""A block whose result is written to afterwards is computed again with gathered parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_dtensor import DTensor, RaggedShard
from vescale_parallel import Plan, mesh, parallelize

RULES = {"blocks.*.up.*": "tp:0", "blocks.*.down.weight": "tp:1", "*": "replicate"}


class Block(nn.Module):
    """Two layers, which note in which layout they find a weight."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.up.weight, DTensor):
            self.seen += self.up.weight.placements
        return self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks whose results are written to, and a head."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor], seen: list[Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(seen) for _ in range(2)])
        self.head, self.write = nn.Linear(8, 3), write

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.write(block(x), x)
        return self.head(x)


def added(y, x):
    y += x
    return y


def part(y, x):
    y[:, :2] = 0
    return y + x


def through_a_view(y, x):
    y.view(-1)[:4].mul_(3.0)
    return y + x


WRITES = {
    "added": added,
    "multiplied": lambda y, x: y.mul_(2),
    "rectified": lambda y, x: F.relu(y, inplace=True) + x,
    "part": part,
    "through a view": through_a_view,
    "none": lambda y, x: y + x,
}


def gradients(write, plan, **sizes):
    torch.manual_seed(0)
    seen: list[Any] = []
    model = Net(write, seen)
    # The result of a linear layer is a view where its input has more dims than two.
    x = torch.randn(5, 3, 8)
    if plan is not None:
        parallelize(model, mesh(**sizes, device_type="cpu"), plan)
    for _ in range(2):
        model(x).square().sum().backward()
    assert not any(isinstance(one, RaggedShard) for one in seen)
    found = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def compare(name, plan, **sizes):
    want = gradients(WRITES[name], None)

    def body(rank, world_size):
        torch.testing.assert_close(gradients(WRITES[name], plan, **sizes), want)

    simulate(4 if "tp" in sizes else 2).run(body)


def test_a_result_that_is_added_to():
    compare("added", Plan(parameters=RULES, batch="dp:0", zero=3, checkpoint="full"), dp=2, tp=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_write(name, level, tp):
    rules = RULES if tp > 1 else {"*": "replicate"}
    plan = Plan(parameters=rules, batch="dp:0", zero=level, checkpoint="full")
    compare(name, plan, dp=2, **({"tp": tp} if tp > 1 else {}))
