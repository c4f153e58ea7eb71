"""A checkpoint of a sharded run holds ordinary names and global shapes, and resumes on any mesh."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from vescale_comm.testing import run
from zero_models import adamw, distributed, make, require_same_values, train

ckpt = pytest.importorskip("vescale_ckpt")


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters = dict(model.named_parameters())
    return {
        "model": parameters,
        "optimizer": {name: dict(optimizer.state[one]) for name, one in parameters.items()},
    }


def write(rank: int, world_size: int, path: str, sizes: dict[str, int], zero: int) -> list[float]:
    model = distributed(make(width=7), sizes, zero)
    optimizer = adamw(model.parameters())
    train(model, 2, lambda _: optimizer)
    ckpt.save(path, state_of(model, optimizer))
    return train(model, 2, lambda _: optimizer)


def read(rank: int, world_size: int, path: str, sizes: dict[str, int], zero: int) -> list[float]:
    model = distributed(make(seed=3, width=7), sizes, zero)
    optimizer = adamw(model.parameters())
    ckpt.init_optimizer_state(optimizer)
    ckpt.load(path, into=state_of(model, optimizer))
    plain = make(width=7)
    train(plain, 2)
    require_same_values(model, plain, rtol=1e-4, atol=2e-5)
    return train(model, 2, lambda _: optimizer)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (({"dp": 2, "tp": 2}, 3), ({"dp": 4}, 3)),
        (({"dp": 4}, 3), ({"dp": 2, "tp": 2}, 0)),
        (({"replica": 2, "dp": 2}, 2), ({"dp": 2, "tp": 2}, 3)),
    ],
    ids=str,
)
def test_a_run_goes_on_from_another_mesh_and_level(tmp_path: Path, before: Any, after: Any):
    path = str(tmp_path / "step")
    expected = run(write, prod(before[0].values()), path, *before)
    for found in run(read, prod(after[0].values()), path, *after):
        assert found == pytest.approx(expected[0], rel=1e-5)
