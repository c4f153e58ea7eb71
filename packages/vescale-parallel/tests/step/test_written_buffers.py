"""However a forward writes to a buffer: right, or refused on every rank.

Python's, numpy's and a model's own generators are drawn from as torch's default one is.

Logical shards and recomputation draw the same whoever computes, and leave generators where they
were.
"""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import (
    Invariant,
    ParallelError,
    Pipeline,
    PipelineError,
    Plan,
    forward_backward,
    parallelize,
)
from vescale_parallel import mesh as make_mesh

WAYS = ["in place", ".data", "batch norm", "replaced"]


class Writes(nn.Module):
    """Keeps something of its rows in a buffer."""

    def __init__(self, way: str, size: int) -> None:
        super().__init__()
        self.inner, self.way = nn.Linear(3, 3), way
        self.calls = 0
        self.register_buffer("seen", torch.zeros(size))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.full((3,), float("nan")))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) + self.seen[0] + self.calls
        self.calls += self.way == "counter"
        with torch.no_grad():
            if self.way == "in place":
                self.seen.add_(1)
            elif self.way == ".data":
                self.seen.data += 1
            elif self.way == "batch norm":
                F.batch_norm(x.detach(), self.mean, self.variance, training=True)
            elif self.way == "replaced":
                self.seen = self.seen + 1
        return x.tanh()


@pytest.mark.parametrize("way", [*WAYS, "none"])
@on_ranks(2, simulated=True)
def test_logical_shards_refuse_writes(way: str):
    torch.manual_seed(0)
    model = nn.Sequential(Writes(way, 3))
    plan = Plan(deterministic=Invariant(4))
    parallelize(model, make_mesh(device_type="cpu", dp=2), plan)
    call = {"loss": (F.mse_loss, torch.ones(8, 3))}
    if way == "none":  # with a NaN in a buffer
        forward_backward(model, torch.ones(8, 3), **call)
        return
    with pytest.raises(ParallelError, match="written to '0"):
        forward_backward(model, torch.ones(8, 3), **call)


@pytest.mark.parametrize("kind", ["invariant", "checkpoint", "zero"])
@on_ranks(2, simulated=True)
def test_what_a_forward_counts_is_counted_once_a_call(kind: str):
    """Its numbers depend on how often it ran, which shards and recomputations do more often."""
    plans = {
        "invariant": Plan(deterministic=Invariant(4)),
        "checkpoint": Plan(checkpoint="full"),
        "zero": Plan(zero=3),
    }
    found: list[Any] = []
    for plan in (None, plans[kind]):
        torch.manual_seed(0)
        model = nn.Sequential(Writes("counter", 3), Writes("counter", 3))
        if plan is not None:
            parallelize(model, make_mesh(device_type="cpu", dp=2), plan)
        rows, targets = torch.linspace(-1, 1, 24).view(8, 3), torch.ones(8, 3)
        if plan is None:
            for _ in range(4):
                F.mse_loss(model(rows), targets).backward()
        else:
            for _ in range(4):
                forward_backward(model, rows, loss=(F.mse_loss, targets))
        grads = [one.grad for one in model.parameters()]
        found.append([getattr(one, "full_tensor", lambda one=one: one)() for one in grads])
        assert [one.calls for one in model] == [4, 4]
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [3, 20_000])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(1, simulated=True)
def test_a_recomputation_writes_nothing_or_is_refused(way: str, size: int):
    found: list[Any] = []
    for checkpoint in (None, "full"):
        torch.manual_seed(0)
        model = nn.Sequential(Writes(way, size), Writes("none", size))
        parallelize(model, make_mesh(device_type="cpu", dp=1), Plan(checkpoint=checkpoint))
        if checkpoint and size > 3 and way != "batch norm":
            with pytest.raises(ParallelError, match="writes to its buffer 'seen'"):
                model(torch.ones(4, 3))
            return
        model(torch.ones(4, 3)).square().sum().backward()
        gradients = [one.grad.to_local() for one in model.parameters()]
        found.append([*gradients, *(one.clone() for one in model.buffers())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("way", [*WAYS, "counter"])
def test_stages_write_what_one_device_writes(way: str):
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Writes(way, 3), Writes(way, 3))

    rows, targets = torch.linspace(-1, 1, 12).view(4, 3), torch.ones(4, 3)
    alone = build()
    expected = []
    for _ in range(2):
        parts = zip(rows.chunk(2), targets.chunk(2), strict=True)
        found = [F.mse_loss(alone(x), y).item() for x, y in parts]
        expected.append(sum(found) / 2)

    def on_a_rank(rank: int, world_size: int) -> None:
        model = build()
        plan = Plan(pipeline=Pipeline(stages="?"), microbatches=2)
        parallelize(model, make_mesh(device_type="cpu", pp=2), plan)
        for one in expected:
            loss = forward_backward(model, rows, loss=(F.mse_loss, targets))
            assert loss.item() == pytest.approx(one, rel=1e-6)
        assert model.get_submodule(str(rank)).calls == alone.get_submodule(str(rank)).calls
        for buffer, other in zip(model.buffers(), alone.buffers(), strict=True):
            assert torch.allclose(buffer, other, rtol=1e-6, equal_nan=True)

    simulate(2)(on_a_rank)


KINDS = ["torch", "python", "numpy", "own", "own numpy"]


class Draws(nn.Module):
    """Scales what it gets by a number that it draws."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(3, 3), kind
        self.own = [torch.Generator().manual_seed(5), numpy.random.default_rng(5)]

    def forward(self, x: Tensor) -> Tensor:
        draw = {
            "none": lambda: 1.0,
            "torch": lambda: torch.rand(()).item(),
            "python": random.random,
            "numpy": numpy.random.rand,
            "own": lambda: torch.rand((), generator=self.own[0]).item(),
            "own numpy": lambda: self.own[1].random(),
        }
        return self.inner(x * draw[self.kind]()).tanh()


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Draws(kind) for _ in range(2)))


def states(model: Any) -> list[Any]:
    found = [random.getstate(), tuple(numpy.random.get_state()[1]), torch.get_rng_state().tolist()]
    own = [model.get_submodule(name).own for name in ("0", "1")]
    return [*found, *((a.get_state().tolist(), b.bit_generator.state) for a, b in own)]


def gradients(model: nn.Module) -> list[Any]:
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for p in model.parameters()]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_logical_shards_draw_the_same_on_any_number_of_ranks(kind: str):
    def on_a_rank(rank: int, world_size: int) -> Any:
        model = model_of(kind)
        plan = Plan(deterministic=Invariant(4))
        parallelize(model, make_mesh(device_type="cpu", dp=world_size), plan)
        # Nobody has to seed these alike.
        random.seed(rank)
        numpy.random.seed(rank)
        before = states(model)
        losses = []
        for _ in range(2):
            loss = forward_backward(model, torch.ones(7, 3), loss=(nn.functional.mse_loss, ONES))
            losses.append(loss.item())
        after = states(model)
        assert [before[:2], before[3:]] == [after[:2], after[3:]]
        return losses, gradients(model)

    expected = simulate(1)(on_a_rank)[0]
    assert expected[0][0] != expected[0][1]
    for found in (*simulate(2)(on_a_rank), *simulate(3)(on_a_rank)):
        assert found[0] == expected[0]
        assert all(map(torch.equal, found[1], expected[1]))


ONES = torch.ones(7, 3)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, simulated=True)
def test_a_recomputation_draws_what_the_forward_has_drawn(kind: str):
    found = []
    for checkpoint in (None, "full"):
        model = model_of(kind)
        parallelize(model, make_mesh(device_type="cpu", dp=1), Plan(checkpoint=checkpoint))
        random.seed(1)
        numpy.random.seed(1)
        model(torch.ones(7, 3)).square().sum().backward()
        found.append((gradients(model), states(model)))
    (one, first), (other, second) = found
    assert all(map(torch.equal, one, other))
    assert first == second


@pytest.mark.parametrize("kind", KINDS)
def test_stages_refuse_generators_that_they_do_not_know(kind: str):
    named = {"python": "Python's random", "numpy": "numpy.random", "torch": ""}.get(kind, "own")

    def on_a_rank(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(Draws("none"), Draws(kind))
        plan = Plan(pipeline=Pipeline(stages="?"), microbatches=2)
        parallelize(model, make_mesh(device_type="cpu", pp=2), plan)
        before = states(model)
        call = (model, torch.ones(4, 3)), {"loss": (nn.functional.mse_loss, torch.ones(4, 3))}
        if not named:
            forward_backward(*call[0], **call[1])
            return
        with pytest.raises(PipelineError, match=named):
            forward_backward(*call[0], **call[1])
        assert states(model) == before

    simulate(2)(on_a_rank)
