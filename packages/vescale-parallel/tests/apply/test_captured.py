"""A parallelised model is captured from its first call on, and trains bit for bit as in eager.

Two copies of one model are trained some steps, one of them captured: by processes and by threads of
one (`simulate`); the forward alone or the whole step. All calls but the first recorded are replays.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_dtensor import capture
from zero_models import batch, distributed, make, whole

STEPS = 5
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Step = Callable[[Tensor, Tensor], Tensor]


def forward_captured(model: nn.Module, optimizer: torch.optim.Optimizer, wrap: Wrap) -> Step:
    forward = wrap(model)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = forward(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return step


def step_captured(model: nn.Module, optimizer: torch.optim.Optimizer, wrap: Wrap) -> Step:
    def gradients(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss.detach()

    wrapped = wrap(gradients)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = wrapped(tokens, targets)
        optimizer.step()
        return loss

    return step


STEP_KINDS = {"forward": forward_captured, "step": step_captured}


def trains(rank: int, world_size: int, sizes: Mapping[str, int], zero: int, kind: str) -> None:
    captured: list[Any] = []

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        captured.append(capture(function))
        return captured[0]

    models = [distributed(make(), sizes, zero) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in models]
    steps = [
        STEP_KINDS[kind](model, optimizer, how)
        for model, optimizer, how in zip(models, optimizers, [lambda f: f, wrap], strict=True)
    ]
    for number in range(STEPS):
        losses = []
        for step in steps:
            torch.manual_seed(number)  # dropout draws the same numbers for both
            losses.append(whole(step(*batch(number))))
        assert torch.equal(*losses), (number, losses)
        eager, twin = (map(whole, model.parameters()) for model in models)
        assert all(map(torch.equal, eager, twin)), number
    assert captured[0].replays >= STEPS - 2
    assert captured[0].programs


CASES = [
    ({"dp": 4}, 0, "forward"),
    ({"dp": 4}, 0, "step"),
    ({"tp": 4}, 0, "step"),
    ({"dp": 2, "tp": 2}, 0, "forward"),
    ({"dp": 2, "tp": 2}, 0, "step"),
]


def test_captured_from_the_first_call():
    run(trains, 2, {"dp": 1, "tp": 2}, 0, "step")


@pytest.mark.parametrize(("sizes", "zero", "kind"), CASES)
def test_captured_under_simulation(sizes, zero, kind):
    simulate(4)(trains, sizes, zero, kind)
