"""Stages on each kind of device train as one such device does, whatever carries their messages.

One body for all: losses, parameters and masks of dropout beside one device that accumulates over
the same microbatches, an evaluation, and a step in which a stage raises. On the host it runs
always; where there are GPUs, on one of them, and on several by NCCL in each way in which its
process group may have been made.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port
from stage_runs import accumulate, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_parallel import Pipeline, PipelineError, Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
BLOCKS, MICROBATCHES, ROWS, WIDTH = 6, 6, 11, 16


class Block(nn.Module):
    """A residual layer that keeps its masks of dropout, and raises if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.masks: list[Tensor] = []
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            raise ValueError("not today")
        dropped = self.dropout(self.layer(x).exp())
        self.masks.append((dropped != 0).detach())
        return x + 0.1 * dropped


class Model(nn.Module):
    """Blocks between two layers, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def random_states(device: str) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def set_random_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for one in states[1:]:
        torch.cuda.set_rng_state(one)


def take_masks(model: nn.Module) -> list[list[Tensor]]:
    """By block those of the latest step, before which the first microbatch is tried."""
    found = [block.masks[-MICROBATCHES:] for block in model.blocks]
    for block in model.blocks:
        block.masks.clear()
    return found


def both(plain: nn.Module, model: nn.Module, rows: Tensor) -> None:
    """A step of each: the same loss and masks, and they leave generators at the same place."""
    before = random_states(rows.device.type)
    expected = accumulate(plain, MICROBATCHES, rows)
    after = random_states(rows.device.type)
    set_random_states(before)
    found = forward_backward(model, rows)
    assert all(map(torch.equal, random_states(rows.device.type), after))
    assert found.device == expected.device
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    masks = pairs(take_masks(model), take_masks(plain))
    assert masks
    assert all(torch.equal(mine, theirs) for mine, theirs in masks)


def pairs(masks: list[list[Tensor]], expected: list[list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Masks of the blocks that this rank has, beside those of one device."""
    return [
        pair for own, other in zip(masks, expected, strict=True) if own
        for pair in zip(own, other, strict=True)
    ]  # fmt: skip


def require_error(model: nn.Module, rows: Tensor, block: int) -> None:
    """A stage raises: every rank does, and those that have not failed name the one that has."""
    model.blocks[block].raises = True
    before = random_states(rows.device.type)
    with pytest.raises((ValueError, PipelineError), match="not today"):
        forward_backward(model, rows)
    model.blocks[block].raises = False
    # One device alone stands where it failed.
    if dist.get_world_size() > 1:
        assert all(map(torch.equal, random_states(rows.device.type), before))
    set_random_states(before)
    assert all(one.grad is None for one in model.parameters())
    take_masks(model)


def check(mesh: DeviceMesh, schedule: str) -> None:
    device = mesh.device_type
    torch.manual_seed(3)
    plain, model = Model().to(device), Model().to(device)
    model.load_state_dict(plain.state_dict())
    torch.manual_seed(11)
    stages = Pipeline(schedule, stages="blocks.*")
    parallelize(model, mesh, Plan(pipeline=stages, microbatches=MICROBATCHES))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(3):
        draws = torch.Generator().manual_seed(step)
        rows = torch.randn(ROWS, WIDTH, generator=draws).to(device)
        if step:
            # At the first block others wait for all of it; at the last one all of it is on its way.
            require_error(model, rows, 0 if step == 1 else BLOCKS - 1)
        both(plain, model, rows)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            both(plain, model, rows)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        found = whole(one.detach())
        assert found.device == other.device
        torch.testing.assert_close(found, other.detach(), rtol=1e-5, atol=1e-5, msg=name)


def on_axis(rank: int, size: int, device: str, schedule: str) -> None:
    check(make_mesh(device_type=device, pp=size), schedule)


def spawned(rank: int, size: int, port: int, how: str) -> None:
    """What a process of `torchrun` does, with a process group made in the way `how`."""
    torch.set_num_threads(1)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    os.environ |= {name: str(one) for name, one in here.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if how.startswith("nccl"):
        torch.cuda.set_device(rank)
        # A group with a device makes communicators at once, and has one for all its messages.
        bound = {"device_id": torch.device("cuda", rank)} if how == "nccl of a device" else {}
        dist.init_process_group("nccl", **bound)
    for schedule in SCHEDULES:
        on_axis(rank, size, "cpu" if how == "gloo" else "cuda", schedule)
    dist.destroy_process_group()


def on_second(rank: int, size: int, port: int, folder: str) -> None:
    import second_device

    torch.set_num_threads(1)
    second_device.compiled(Path(folder))
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(second_device.NAME, rank=rank, world_size=size, init_method=address)
    mesh = DeviceMesh(second_device.NAME, torch.arange(size), mesh_dim_names=("pp",))
    for schedule in SCHEDULES:
        check(mesh, schedule)
    dist.destroy_process_group()


def spawn(work: Any, size: int, last: str) -> None:
    mp.spawn(work, (size, free_port(), last), nprocs=size)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_processes_on_the_host(schedule: str):
    run(on_axis, 3, "cpu", schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [1, 3])
def test_simulated_ranks_on_the_host(size: int, schedule: str):
    simulate(size)(on_axis, "cpu", schedule)


@pytest.mark.slow
def test_processes_that_are_started_as_those_of_gpus_are():
    spawn(spawned, 2, "gloo")


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("ninja")), reason="there is no compiler here"
)
def test_a_device_that_is_not_the_host(tmp_path: Path):
    spawn(on_second, 2, str(tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [1, 3])
def test_simulated_ranks_on_one_gpu(size: int, schedule: str):
    simulate(size)(on_axis, "cuda", schedule)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_a_process_on_one_gpu():
    spawn(spawned, 1, "mesh")


@pytest.mark.multigpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 CUDA devices, found {torch.cuda.device_count()}"
)
@pytest.mark.parametrize("how", ["mesh", "nccl", "nccl of a device"])
def test_processes_on_several_gpus(how: str):
    spawn(spawned, min(torch.cuda.device_count(), 3), how)
