"""The hook that makes a total a contribution again stays from step to step, and never counts twice.

After random sequences of what programs do to gradients each one is that of one device.
"""

import random

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Replicate, Shard, gradient_total

MOVES = (
    *["backward"] * 4,
    *["total", "zero"] * 2,
    *("zero in place", "taken", "assigned", "aside", "float and back", "frozen for once"),
    *("view", "kept", "step"),
)


def moves_of(seed: int) -> list[str]:
    return random.Random(seed).choices(MOVES, k=40)


class Side:
    """A weight, used varyingly on a mesh or as it is."""

    def __init__(self, weight: nn.Parameter, x: torch.Tensor) -> None:
        self.weight, self.x = weight, x
        self.kept: list[torch.Tensor] = []

    def loss(self, number: int) -> torch.Tensor:
        # The weight itself, and no view of it, which would have a sum of its own.
        return F.linear(self.x * (1 + number % 3), self.weight).sin().sum()

    def make(self, move: str, number: int) -> None:
        weight = self.weight
        if move == "backward":
            self.loss(number).backward()
        elif move == "total":
            gradient_total(weight) if isinstance(weight, vd.DTensor) else None
        elif move == "zero":
            weight.grad = None
        elif move == "zero in place" and weight.grad is not None:
            weight.grad.zero_()
        elif move == "taken":
            torch.autograd.grad(self.loss(number), [weight])
        elif move == "assigned" and weight.grad is not None:
            weight.grad = weight.grad * 2
        elif move == "aside" and weight.grad is not None:
            weight.grad = weight.grad
        elif move == "float and back":
            grad = weight.grad
            weight.data = weight.data.float().double()
            weight.grad = grad
        elif move == "frozen for once":
            weight.requires_grad_(False)
            weight.requires_grad_(True)
        elif move == "view" and weight.grad is not None:
            weight.grad.mul_(0.5)
        elif move == "kept" and weight.grad is not None:
            self.kept = [weight.grad]
        elif move == "step" and weight.grad is not None:
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=0.01)


def close(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    # Values that go through float32 may be rounded to the next one.
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{where}: {text}"
    )


@pytest.mark.parametrize("seed", range(12))
@on_ranks(3, simulated=True)
def test_gradients_are_those_of_one_device(rank: int, world_size: int, seed: int):
    dense = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    x = torch.linspace(-2, 2, 15, dtype=torch.float64).reshape(5, 3)
    mesh = device_mesh((world_size,), ("dp",))
    here = Side(nn.Parameter(dense.clone()), x)
    placed = vd.distribute_tensor(dense, mesh, [Replicate()], src_data_rank=None)
    rows = vd.distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
    there = Side(nn.Parameter(placed), rows)
    for number, move in enumerate(moves_of(seed)):
        for side in (here, there):
            side.make(move, number)
        where = f"{number}: {move} of {moves_of(seed)[: number + 1]}"
        assert (here.weight.grad is None) == (there.weight.grad is None), where
        if number % 3 == 0 and here.weight.grad is not None:
            found = there.weight.grad.full_tensor()
            close(found, here.weight.grad, where)
        close(there.weight.detach().full_tensor(), here.weight.detach(), where)


@on_ranks(2, simulated=True)
def test_it_is_registered_once(rank: int, world_size: int):
    mesh = device_mesh((world_size,), ("dp",))
    placed = vd.distribute_tensor(torch.ones(4, 3), mesh, [Replicate()], src_data_rank=None)
    weight = nn.Parameter(placed)
    x = vd.distribute_tensor(torch.ones(6, 3), mesh, [Shard(0)], src_data_rank=None)
    handles = set()
    for _ in range(4):
        F.linear(x, weight).square().sum().backward()
        gradient_total(weight)
        handles.add(id(weight._leaf_gradient.accumulation_hook[0]))
        weight.grad = None
    assert len(handles) == 1
    # Backwards without a total in between pay for one call.
    F.linear(x, weight).square().sum().backward()
    assert weight._leaf_gradient.accumulation_hook is not None
    F.linear(x, weight).square().sum().backward()
    assert weight._leaf_gradient.accumulation_hook is None
