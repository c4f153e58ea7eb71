"""Nothing grows: a long loop of small ops and many training steps leave memory as it was.

The quick form runs always; `-m slow` runs a million ops and a thousand steps.
"""

import gc
import resource
import sys

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Replicate, Shard

MEBIBYTE = 2**20
ALLOWED_GROWTH = 24 * MEBIBYTE


def resident():
    """Peak resident bytes of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def wrappers():
    """How many DTensors are alive, without asking any of them to be collected."""
    return sum(type(thing) is vd.DTensor for thing in gc.get_objects())


def small_ops(mesh, count):
    x = vd.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Replicate()])
    w = vd.distribute_tensor(torch.eye(8), mesh, [Replicate(), Shard(1)])
    for step in range(count // 5):
        length = 8 + step % 200  # shapes come and go
        y = x * (1.0 / (step + 1))
        y = (y + x).relu()
        if step % 50 == 0:
            piece = torch.full((length, 2), 1.0)
            vd.distribute_tensor(piece, mesh, [Shard(0), Replicate()], src_data_rank=None).sum()
        y = y.view(-1)
        w.t()


def training_steps(mesh, model, optimizer, count):
    for step in range(count):
        batch = torch.full((5 + step % 3, 8), 0.1)
        placed = vd.distribute_tensor(batch, mesh, [Shard(0), Replicate()], src_data_rank=None)
        F.dropout(model(placed), 0.1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def build(mesh):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    for module, split in ((model[0], 0), (model[2], 1)):
        for name, parameter in list(module.named_parameters()):
            on_tp = Shard(split) if parameter.ndim > split else Replicate()
            made = vd.distribute_tensor(parameter, mesh, [Replicate(), on_tp], src_data_rank=None)
            setattr(module, name, nn.Parameter(made))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def soak(rank, world, ops, steps):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model, optimizer = build(mesh)
    small_ops(mesh, max(2000, ops // 10))
    training_steps(mesh, model, optimizer, max(10, steps // 10))
    gc.collect()
    gc.disable()
    try:
        alive, memory = wrappers(), resident()
        small_ops(mesh, ops)
        training_steps(mesh, model, optimizer, steps)
        return wrappers() - alive, resident() - memory
    finally:
        gc.enable()


def check(ops, steps, timeout):
    for more_wrappers, more_memory in run(soak, 4, ops, steps, timeout=timeout):
        assert more_wrappers == 0
        assert more_memory < ALLOWED_GROWTH


def test_memory_stays_flat():
    check(10_000, 30, 120)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_memory_stays_flat_for_a_million_ops():
    check(1_000_000, 1_000, 1400)
