"""What stages cost a step in Python: calls of functions of these packages, counted.

Times depend on what else a machine does; such counts do not. Beside torch's own pipelining, whose
model is cut by hand, what is counted here is all that stages of a model that nobody cut cost more.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from counted_calls import counted
from torch import Tensor, nn
from vescale_comm.testing import run
from vescale_parallel import Plan, forward_backward, mesh, parallelize

WIDTH, MICROBATCHES = 8, 8
# Behind the first events of all logs, in which more is compared.
WARM_UP = 150
# Of Python 3.11, on the rank with the most. Later ones have no calls for comprehensions.
EACH = {"eager": 86, "static": 336}
"""For each block of the model: half of the ranks have it, the others stand in for it."""
WHOLE = {"eager": 2060, "static": 3050}
"""In a step of four blocks."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def calls(rank: int, world_size: int, static: bool) -> list[Counter[str]]:
    """Of a steady step, of four blocks and of eight."""
    x = torch.linspace(-1, 1, MICROBATCHES * WIDTH).reshape(MICROBATCHES, WIDTH)
    found = []
    for blocks in (4, 8):
        how = Plan(pipeline={"schedule": "1f1b", "microbatches": MICROBATCHES})
        model = parallelize(Model(blocks), mesh(device_type="cpu", pp=2), how, static=static)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            forward_backward(model, x)
            optimizer.step()

        for _ in range(WARM_UP):
            step()
        found.append(counted(step))
    return found


@pytest.mark.parametrize("how", EACH)
def test_calls_of_a_step(how: str):
    ranks = run(calls, 2, how == "static")
    for rank, (few, many) in enumerate(ranks):
        more = many - few
        each, whole = sum(more.values()) / 4, sum(few.values())
        assert each <= EACH[how], (rank, each, more.most_common())
        assert whole <= WHOLE[how], (rank, whole, few.most_common())
        # Where functions tell of their uses by themselves no mode is entered for them.
        assert not few["parallel/_pipeline/foreign.py:__torch_function__"]
