"""However a forward writes to a buffer: right, or refused on every rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import ParallelError, Plan, forward_backward, parallelize
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
    plan = Plan(deterministic="dp-invariant", shards=4)
    parallelize(model, make_mesh(device_type="cpu", dp=2), plan)
    call = {"loss": (F.mse_loss, torch.ones(8, 3))}
    if way == "none":  # with a NaN in a buffer
        forward_backward(model, torch.ones(8, 3), **call)
        return
    with pytest.raises(ParallelError, match="written to '0"):
        forward_backward(model, torch.ones(8, 3), **call)


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
        plan = Plan(pipeline={"stages": "?", "schedule": "1f1b", "microbatches": 2})
        parallelize(model, make_mesh(device_type="cpu", pp=2), plan)
        for one in expected:
            loss = forward_backward(model, rows, loss=(F.mse_loss, targets))
            assert loss.item() == pytest.approx(one, rel=1e-6)
        own = model.get_submodule(str(rank))
        assert own.calls == alone.get_submodule(str(rank)).calls
        for buffer, other in zip(model.buffers(), alone.buffers(), strict=True):
            assert torch.allclose(buffer, other, rtol=1e-6, equal_nan=True)

    simulate(2)(on_a_rank)
