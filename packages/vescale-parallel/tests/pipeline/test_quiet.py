"""Later forwards of a stage look where the first one found what passes between stages.

They are to compute with what they are called with, and to notice what they are called with
otherwise.
"""

from typing import Any

import pytest
import torch
from stage_runs import require_gradients, staged, step_both
from torch import Tensor, nn
from vescale_comm.testing import on_ranks
from vescale_parallel import PipelineError, forward_backward
from vescale_parallel._pipeline.run.route_calls import RouteCalls

MICROBATCHES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor, scale: float = 1.0, skip: Any = None) -> Tensor:
        mixed = torch.tanh(self.linear(x)) * scale + table
        return mixed if skip is None else mixed + skip


class Model(nn.Module):
    """What its blocks are called with follows from its inputs, which all ranks have."""

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.calls = calls
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(4, 1)
        self.register_buffer("table", torch.linspace(0, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, 0])
        start = x = self.first(x)
        for block in self.blocks:
            if self.calls == "scaled":
                x = block(x, self.table, 1.0 + number)
            elif self.calls == "skipped":
                x = block(x, self.table, 1.0, start)
            elif self.calls == "nested":
                x = block(x, *(self.table, 1.0, None))
            elif self.calls == "by name" and number == 2:
                x = block(x, table=self.table)
            elif self.calls == "exchanged" and number == 2:
                x = block(self.table.expand(x.shape).contiguous(), x)
            else:
                x = block(x, self.table)
        return self.last(x).square().mean()


def make(calls: str) -> Model:
    torch.manual_seed(5)
    return Model(calls)


def batch(seed: int) -> Tensor:
    x = torch.randn(2 * MICROBATCHES, 4, generator=torch.Generator().manual_seed(seed))
    x[:, 0] = torch.arange(MICROBATCHES).repeat_interleave(2)
    return x


def in_stages(calls: str, schedule: str, ranks: int) -> Any:
    return staged(make(calls), {"pp": ranks}, schedule=schedule, microbatches=MICROBATCHES)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zbv"])
@pytest.mark.parametrize("calls", ["plain", "scaled", "skipped", "nested", "by name"])
@on_ranks(2, simulated=True)
def test_blocks_compute_with_what_they_are_called_with(
    rank: int, world_size: int, calls: str, schedule: str
):
    model, plain = in_stages(calls, schedule, world_size), make(calls)
    quiet, answered = RouteCalls.call, []
    RouteCalls.call = lambda self, *given: (answered.append(1), quiet(self, *given))[1]
    try:
        for seed in range(3):
            step_both(model, plain, MICROBATCHES, batch(seed))
    finally:
        RouteCalls.call = quiet
    require_gradients(model, plain, rtol=1.3e-6, atol=1e-5)
    assert answered


@on_ranks(3, simulated=True)
def test_a_block_that_is_called_otherwise_is_told(rank: int, world_size: int):
    model = in_stages("plain", "1f1b", world_size)
    for seed in range(2):
        forward_backward(model, batch(seed))
    model.calls = "exchanged"
    with pytest.raises(PipelineError, match=r"lacks .*, and in its trial run it lacked"):
        forward_backward(model, batch(2))
    model.calls = "plain"
    forward_backward(model, batch(3))
