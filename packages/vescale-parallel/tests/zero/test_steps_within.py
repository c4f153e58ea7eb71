"""An optimizer that steps amid a forward, as a loop in `training_step` does, is seen at once."""

import copy
from typing import Any

import pytest
import torch
from program_ways import LAYOUTS, Tower, adam, batch, make, values
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_parallel import Plan, Zero, parallelize, through_forward
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


class Ahead(nn.Module):
    """Two layers large enough to be gathered each by itself; the second changes amid a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(600, 600, bias=False) for _ in range(2))
        self.between: Any = len

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.between([])
        y: Tensor = self.b(h.detach())
        return y.sum()


def written_ahead(rank: int, world_size: int, zero: int, how: str) -> list[float]:
    torch.manual_seed(0)
    found = []
    plain = Ahead()
    model = copy.deepcopy(plain)
    plan = Plan(zero=Zero(zero, units=["a", "b"], prefetch=1))
    parallelize(model, make_mesh(device_type="cpu", dp=world_size), plan)
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.b.parameters(), lr=0.5)

        def multiply(one: Ahead = one) -> None:
            with torch.no_grad():
                one.b.weight.mul_(3.0)

        ways = {
            "step": optimizer.step,
            "write": multiply,
            "data": lambda one=one: one.b.weight.data.mul_(3.0),
        }
        x = torch.randn(4, 600, generator=torch.Generator().manual_seed(1))
        one(x).backward()
        one.between = lambda _, way=ways[how]: way()
        with torch.no_grad():
            losses = [one(x) for _ in range(2)]
        found.append([float(getattr(each, "full_tensor", each.detach)()) for each in losses])
    return [abs(a - b) / abs(b) for a, b in zip(*reversed(found), strict=True)]


@pytest.mark.parametrize("how", ["step", "write", "data"])
@pytest.mark.parametrize("zero", [1, 3])
def test_what_was_gathered_ahead_is_compared_with_later_writes(zero: int, how: str):
    for apart in simulate(2).run(written_ahead, zero, how):
        assert max(apart) < 1e-4


class Moved(nn.Module):
    """Its own weight is given other memory and stepped, before it is computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0))
        self.before: Any = len

    def forward(self, x: Tensor) -> Tensor:
        self.before([])
        return (x * self.weight).sum()


def moved_and_stepped(rank: int, world_size: int, zero: int, of_module: bool) -> None:
    plain, model = Moved(), Moved()
    parallelize(model, make_mesh(device_type="cpu", dp=world_size), Plan(zero=zero))
    losses: list[list[float]] = []
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        found = [one(torch.ones(4, 8))]
        found[0].backward()

        def change(_: Any, one: Moved = one, optimizer: Any = optimizer) -> None:
            moved = one.weight if of_module else optimizer.param_groups[0]["params"][0]
            moved.data = moved.data.clone()
            optimizer.step()

        one.before = change
        found += [one(torch.ones(4, 8)) for _ in range(2)]
        found[-1].backward()
        found.append(one.weight.grad.sum())
        losses.append([getattr(each, "full_tensor", each.detach)().item() for each in found])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("of_module", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_is_assigned_and_stepped_amid_a_forward(zero: int, of_module: bool):
    simulate(2).run(moved_and_stepped, zero, of_module)
