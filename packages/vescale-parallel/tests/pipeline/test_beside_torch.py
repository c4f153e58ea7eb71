"""Beside torch's own pipelining, in the same processes: the same losses and parameters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_llama import LENGTH, VOCABULARY, Part, llama
from stage_runs import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional
from vescale_comm.testing import run
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh

ROWS, STEPS = 16, 3
LAYOUTS = {"pp2": {"pp": 2}, "pp4": {"pp": 4}, "pp2 dp2": {"pp": 2, "dp": 2}}
# torch's schedule and the stages of a rank. Where both split backward, each has its own order.
KINDS: dict[str, tuple[Any, int]] = {
    "gpipe": (schedules.ScheduleGPipe, 1),
    "1f1b": (schedules.Schedule1F1B, 1),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2),
    "zb-h1": (schedules.ScheduleInterleavedZeroBubble, 1),
    "zbv": (schedules.ScheduleZBVZeroBubble, 2),
    "dualpipev": (schedules.ScheduleDualPipeV, 2),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    drawn = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=draws)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def built(ranks: int) -> Any:
    """Two blocks a rank, so that every schedule cuts it evenly; the same values everywhere."""
    torch.manual_seed(0)
    return llama(2 * ranks)


def own_stages(name: str, rank: int, ranks: int) -> list[int]:
    """Which stages a rank has: in a V the second one is counted from the end."""
    second = 2 * ranks - 1 - rank if name in ("zbv", "dualpipev") else rank + ranks
    return [rank, second][: KINDS[name][1]]


def average_gradients(parts: list[nn.Module], mesh: DeviceMesh) -> None:
    """What data parallelism does at the end of a step."""
    if "dp" in (mesh.mesh_dim_names or ()):
        for one in (p for part in parts for p in part.parameters()):
            dist.all_reduce(one.grad, group=mesh["dp"].get_group())
            one.grad.div_(mesh["dp"].size())


def by_torch(mesh: DeviceMesh, name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses where the last stage is, and the parameters of this rank's stages."""
    group = mesh["pp"].get_group()
    ranks, (kind, chunks) = group.size(), KINDS[name]
    own, count, device = own_stages(name, group.rank(), ranks), ranks * chunks, torch.device("cpu")
    model = built(ranks)
    parts = [Part(model, at, count) for at in own]
    stages: Any = [
        PipelineStage(part, at, count, device, group=group)
        for part, at in zip(parts, own, strict=True)
    ]
    if name in ("gpipe", "1f1b"):
        (stages,) = stages
    how = kind(stages, 2 * ranks, loss_fn=of_tokens)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    told = []
    for step in range(STEPS):
        inputs, targets = (share_of(one, mesh) for one in batch(step))
        losses: list[Tensor] = []
        optimizer.zero_grad()
        last = {"target": targets, "losses": losses} if count - 1 in own else {}
        how.step(*([inputs] if 0 in own else []), **last)
        average_gradients(parts, mesh)
        optimizer.step()
        if losses:
            told.append(averaged(torch.stack(losses).mean().detach(), mesh))
    ours = {id(p) for part in parts for p in part.parameters()}
    return told, {n: p.detach() for n, p in model.named_parameters() if id(p) in ours}


def share_of(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """The rows of this rank's place along dp; any split has the same mean."""
    if "dp" not in (mesh.mesh_dim_names or ()):
        return rows
    return rows.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]


def averaged(loss: Tensor, mesh: DeviceMesh) -> Tensor:
    """The mean over dp, whose ranks have as many rows each."""
    if "dp" in (mesh.mesh_dim_names or ()):
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        loss /= mesh["dp"].size()
    return loss


def by_us(mesh: DeviceMesh, name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and all parameters, on every rank."""
    ranks = mesh["pp"].size()
    model = built(ranks)
    words = {"stages": "blocks.*", "schedule": name, "microbatches": 2 * ranks}
    parallelize(model, mesh, Plan(pipeline=words))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        told.append(forward_backward(model, inputs, loss=(of_tokens, targets)))
        optimizer.step()
    return told, {n: whole(p).detach() for n, p in model.named_parameters()}


def on_a_rank(rank: int, world_size: int, layout: str, name: str) -> None:
    mesh = make_mesh(device_type="cpu", **LAYOUTS[layout])
    losses, parameters = by_us(mesh, name)
    theirs, of_stages = by_torch(mesh, name)
    dist.barrier()
    assert len(theirs) in (0, STEPS)
    for mine, other in zip(losses, theirs, strict=bool(theirs)):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0.0)
    assert of_stages
    for key, one in of_stages.items():
        torch.testing.assert_close(parameters[key], one, rtol=1e-6, atol=1e-7, msg=key)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_parameters_are_those_of_torchs_pipelining(layout: str, name: str):
    if name in ("zbv", "dualpipev") and torch.__version__ < "2.12":
        pytest.skip("torch 2.11's own schedule sends from a rank to itself, which gloo cannot")
    ranks = torch.Size(LAYOUTS[layout].values()).numel()
    run(on_a_rank, ranks, layout, name, timeout=100)
