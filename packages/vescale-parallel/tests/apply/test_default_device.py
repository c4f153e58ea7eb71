"""Training steps are the same whatever torch's default device is, if the user says his own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_dtensor import init_device_mesh
from vescale_parallel import Pipeline, Plan, forward_backward, parallelize
from word_models import WORDS, WordModel, loss_of


def whole(model: nn.Module, x: Tensor) -> Any:
    loss = loss_of(model(x), x)
    loss.backward()
    return loss


def in_microbatches(model: nn.Module, x: Tensor) -> Any:
    return forward_backward(model, x, loss=(loss_of, x))


STAGES = {"pipeline": Pipeline(stages="blocks.*"), "microbatches": 4}

CASES: dict[str, tuple[str, dict[str, Any], bool, Callable[[nn.Module, Tensor], Any]]] = {
    "dp": ("dp", {"batch": "dp:0"}, False, whole),
    "zero3": ("dp", {"batch": "dp:0", "zero": 3}, False, whole),
    "zero3 static": ("dp", {"batch": "dp:0", "zero": 3}, True, whole),
    "recomputed": ("dp", {"batch": "dp:0", "zero": 3, "checkpoint": "full"}, False, whole),
    "stages": ("pp", STAGES, False, in_microbatches),
}


def losses(name: str, default: str) -> list[list[float]]:
    axis, words, static, step = CASES[name]

    def program(rank: int, world_size: int) -> list[float]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            model: nn.Module = WordModel()
        found = []
        # In the thread of each rank: a default device is a thread's.
        with torch.device(default):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
            model = parallelize(model, mesh, Plan(**words), static=static)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            for number in range(3):
                x = (torch.arange(32, device="cpu").view(8, 4) * 7 + number) % WORDS
                found.append(float(step(model, x)))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return found

    return simulate(2)(program)


@pytest.mark.parametrize("name", CASES)
def test_the_default_device_is_nothing_to_a_step(name: str) -> None:
    assert losses(name, "meta") == losses(name, "cpu")
