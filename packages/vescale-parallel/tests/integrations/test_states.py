"""Trainers write and read the states of one device on any mesh; steps see sharded batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Plan, mesh, parallelize, through_forward
from vescale_parallel.integrations import _states as states

ROWS = 6
LAYOUTS = [({"dp": 4}, 0), ({"dp": 4}, 3), ({"dp": 2, "tp": 2}, 1)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.tied = nn.Parameter(torch.eye(5))
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.down(torch.tanh(self.up(x)))) @ self.tied
        return found

    def training_loss(self, x: Tensor, *, scale: float) -> Tensor:
        self.seen = x
        return self(x).square().mean() * scale

    def raising(self, x: Tensor) -> Tensor:
        raise KeyError("mine")


def made(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def plan(zero: int) -> Plan:
    rules = {"up.*": "tp:0", "down.weight": "tp:1", "*": "replicate"}
    return Plan(batch="dp:0", parameters=rules, zero=zero)


def optimizers(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "Adafactor":  # states that are smaller than their parameter
        return torch.optim.Adafactor(model.parameters(), lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> float:
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(at))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
@pytest.mark.parametrize(("sizes", "zero"), LAYOUTS, ids=str)
def test_states_are_those_of_one_device_and_are_read_into_a_mesh(kind, sizes, zero):
    one = made()
    reference = optimizers(kind, one)
    for at in range(2):
        step(one, reference, at)
    expected, weights = copy.deepcopy(reference.state_dict()), copy.deepcopy(one.state_dict())
    losses = [step(one, reference, at) for at in (2, 3)]

    def on_a_rank(rank: int, world_size: int) -> Any:
        here = mesh(device_type="cpu", **sizes)
        model = parallelize(made(), here, plan(zero))
        optimizer = optimizers(kind, model)
        for at in range(2):
            step(model, optimizer, at)
        with states.whole_states(optimizer):
            found = optimizer.state_dict()
        kept = states.model_state(model)
        assert bool(kept) == bool(found["state"]) == (rank == 0)
        # Outside of it, states lie as their parameters do.
        assert any(isinstance(one, DTensor) for one in optimizer.state_dict()["state"][0].values())
        other = parallelize(made(seed=9), here, plan(zero))
        again = optimizers(kind, other)
        other.load_state_dict(weights)
        with states.loading_whole(again):
            again.load_state_dict(copy.deepcopy(expected))
        assert [step(other, again, at) for at in (2, 3)] == pytest.approx(losses, rel=1e-4)
        return found, kept

    found, kept = simulate(4).run(on_a_rank)[0]
    assert kept["tied"] is kept["head.weight"]
    for name, value in weights.items():
        torch.testing.assert_close(kept[name], value, rtol=1e-4, atol=1e-6)
    assert found["param_groups"] == expected["param_groups"]
    for index, values in expected["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(found["state"][index][name], value, rtol=1e-3, atol=1e-6)


def test_methods_are_called_as_forward_is():
    dense = made()
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1))
    expected = dense.training_loss(x, scale=2.0).item()

    def on_a_rank(rank: int, world_size: int) -> float:
        model = parallelize(made(), mesh(dp=4, device_type="cpu"), plan(3))
        before = vars(model).get("forward")
        with pytest.raises(KeyError, match="mine"):
            through_forward(model, "raising", x)
        assert vars(model).get("forward") is before
        loss = through_forward(model, "training_loss", x, scale=2.0)
        assert model.seen.to_local().shape[0] < ROWS
        assert vars(model).get("forward") is before
        return float(loss.item())

    assert simulate(4).run(on_a_rank)[0] == pytest.approx(expected, rel=1e-5)


def test_what_ranks_decide_and_tell_is_data() -> None:
    sent = {"lr": [0.1, float("inf")], "path": ("run/3.ckpt", None), 3: True}

    def told(rank: int, world_size: int) -> None:
        assert states.decided(rank == 1, every=False)
        assert not states.decided(rank == 1, every=True)
        assert states.broadcast_plain(sent if rank == 1 else None, 1) == sent
        assert states.broadcast_plain(Path("run") if rank == 0 else 7, 0) == "run"
        with pytest.raises(TypeError, match="rank 0 has no plain value to send"):
            states.broadcast_plain(nn.Linear(1, 1) if rank == 0 else 3, 0)

    simulate(3).run(told)
    assert states.broadcast_plain(sent, 0) is sent
