"""Beside torch's own pipelining, in the same processes: the same losses and parameters."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stage_runs import whole
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from vescale_comm.testing import run
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh

MICROBATCHES, STEPS = 4, 3
KINDS: dict[str, tuple[Any, list[list[int]]]] = {
    "gpipe": (schedules.ScheduleGPipe, [[0], [1]]),
    "1f1b": (schedules.Schedule1F1B, [[0], [1]]),
    "interleaved": (schedules.ScheduleInterleaved1F1B, [[0, 2], [1, 3]]),
    "zbv": (schedules.ScheduleZBVZeroBubble, [[0, 3], [1, 2]]),
    "dualpipev": (schedules.ScheduleDualPipeV, [[0, 3], [1, 2]]),
}


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=draws), torch.randn(8, 6, generator=draws)


def by_torch(rank: int, name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses where the last stage is, and the parameters of this rank's stages."""
    kind, places = KINDS[name]
    own, count = places[rank], sum(map(len, places))
    share = 4 // count
    model = blocks()
    parts = [model[at * share : (at + 1) * share] for at in own]
    stages = [
        PipelineStage(part, at, count, torch.device("cpu"))
        for part, at in zip(parts, own, strict=True)
    ]
    how = kind(stages if count > 2 else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    told = []
    for step in range(STEPS):
        x, targets = batch(step)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        last = {"target": targets, "losses": losses} if count - 1 in own else {}
        how.step(*([x] if 0 in own else []), **last)
        optimizer.step()
        if losses:
            told.append(torch.stack(losses).mean().item())
    ours = {id(p) for part in parts for p in part.parameters()}
    return told, {n: copy.copy(p.detach()) for n, p in model.named_parameters() if id(p) in ours}


def by_us(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model = blocks()
    words = {"stages": "?", "schedule": name, "microbatches": MICROBATCHES}
    parallelize(model, make_mesh(device_type="cpu", pp=2), Plan(pipeline=words))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    for step in range(STEPS):
        x, targets = batch(step)
        optimizer.zero_grad()
        told.append(forward_backward(model, x, loss=(nn.functional.mse_loss, targets)).item())
        optimizer.step()
    return told, {n: whole(p).detach() for n, p in model.named_parameters()}


def on_a_rank(rank: int, world_size: int, name: str) -> None:
    losses, parameters = by_us(name)
    theirs, of_stages = by_torch(rank, name)
    dist.barrier()
    for mine, other in zip(losses, theirs, strict=False):
        assert mine == pytest.approx(other, rel=1e-6)
    for key, one in of_stages.items():
        torch.testing.assert_close(parameters[key], one, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", KINDS)
def test_losses_and_parameters_are_those_of_torchs_pipelining(name: str):
    if name in ("zbv", "dualpipev") and torch.__version__ < "2.12":
        pytest.skip("torch 2.11's own schedule sends from a rank to itself, which gloo cannot")
    run(on_a_rank, 2, name, timeout=100)
