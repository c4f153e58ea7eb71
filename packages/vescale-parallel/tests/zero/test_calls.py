"""What a block costs a step of ZeRO-3 in Python: calls of functions of these packages, counted.

Times depend on what else a machine does; such counts do not. What a model's blocks have in common
is left out, by comparing two models: it is the blocks that there are many of.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from counted_calls import counted
from torch import Tensor, nn
from vescale_comm.testing import run
from vescale_parallel import Plan, mesh, parallelize

WIDTH = 8
# Behind the first events of all logs, in which more is compared.
WARM_UP = 60
# Of Python 3.11. Later ones have no calls for comprehensions.
MOST = {"static": 383, "eager": 406}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def calls(rank: int, world_size: int, static: bool) -> list[Counter[str]]:
    """Of a steady step, of two blocks and of four."""
    over = mesh(device_type="cpu", dp=world_size)
    plan = Plan(batch="dp:0", parameters={"*": "replicate"}, zero=3)
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    found = []
    for blocks in (2, 4):
        model = parallelize(Model(blocks), over, plan, static=static)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

        for _ in range(WARM_UP):
            step()
        found.append(counted(step))
    return found


@pytest.mark.parametrize("how", MOST)
def test_calls_for_each_block(how: str):
    few, many = run(calls, 2, how == "static")[0]
    more = many - few
    number = sum(more.values()) / 2
    assert number <= MOST[how], (number, more.most_common())


def test_where_an_event_was_is_found_at_once():
    few, many = run(calls, 2, True)[0]
    # Not by walking up the stack, other than at the first call from another depth.
    for found in (few, many):
        records = found["comm/_watchdog/execution_log.py:record"]
        assert records
        assert found["comm/_watchdog/execution_log.py:_is_users"] <= records / 8
