"""An optimizer that steps amid a forward, as a loop in `training_step` does, is seen at once."""

from typing import Any

import pytest
import torch
from program_ways import LAYOUTS, Tower, adam, batch, make, values
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_parallel import Plan, parallelize, through_forward
from vescale_parallel import mesh as make_mesh


class Loop(Tower):
    """Steps itself, and uses parameters of its own beside its layers."""

    optimizer: torch.optim.Optimizer

    def several_steps(self, x: Tensor, y: Tensor) -> list[Tensor]:
        found, head = [], self.head.weight
        for _ in range(3):
            self.optimizer.zero_grad()
            loss = self(x, y) + 0.1 * head.square().sum() + 0.1 * self.up.bias.square().sum()
            loss.backward()
            self.optimizer.step()
            found.append(loss.detach())
        return [*found, self.head.weight.detach().sum(), head.detach().sum()]


def run(model: Any, dtype: torch.dtype) -> list[float]:
    model.optimizer = adam(model)
    found: list[float] = []
    for step in range(2):
        given = [one.to(dtype) for one in batch(step)]
        for one in through_forward(model, "several_steps", *given):
            found.append(float(one.full_tensor() if hasattr(one, "full_tensor") else one))
    return found + values(model)


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero3", "tp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["", "cast"])
def test_the_numbers_of_one_device(dtype: torch.dtype, layout: str, static: bool):
    expected = torch.tensor(run(make(Loop), torch.float32))

    def on_a_rank(rank: int, world_size: int) -> list[float]:
        sizes, words = LAYOUTS[layout]
        precision = {"compute": str(dtype).removeprefix("torch.")}
        plan, mesh = Plan(**words, precision=precision), make_mesh(device_type="cpu", **sizes)
        model: nn.Module = parallelize(make(Loop), mesh, plan, static=static)
        return run(model, dtype)

    for found in simulate(2).run(on_a_rank):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-3, atol=1e-4)
