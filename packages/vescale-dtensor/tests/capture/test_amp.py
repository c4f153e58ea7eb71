"""Captured programs follow autocast and GradScaler: bit for bit eager's training.

Autocast around a captured function is guarded, inside it is recorded; scales are tensors, so that a
replay reads what the last one wrote.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Replicate, Shard

BF16, FP16 = torch.bfloat16, torch.float16
LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 1])
STEPS, INFINITE = 10, 3
# Doubled after two good steps, halved by the infinite one.
SCALES = [1024, 2048, 2048, 1024, 1024, 2048, 2048, 4096, 4096, 8192]


def network(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 5))
    for linear, dim in ((model[0], 0), (model[3], 1)):
        weight = vd.distribute_tensor(linear.weight.detach(), mesh, [Replicate(), Shard(dim)])
        linear.weight = nn.Parameter(weight)
    return vd.distribute_module(model, mesh)


def batch(step, mesh):
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(step))
    if step == INFINITE:
        x[6, 3] = torch.inf  # of the last rows: half of the ranks see it
    return vd.distribute_tensor(x, mesh, [Shard(0), Replicate()])


class Training:
    """A model, an optimizer, a scaler, and steps of which more or less is captured."""

    def __init__(self, mesh):
        self.model = network(mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def plain(self, x):
        logits = self.model(x)
        return F.cross_entropy(logits, LABELS), logits

    def cast(self, x):
        with torch.autocast("cpu", BF16):
            hidden = self.model[:3](x)
            with torch.autocast("cpu", enabled=False):
                hidden = hidden.float()
            logits = self.model[3](hidden)
            return F.cross_entropy(logits, LABELS), logits

    def backward(self, x):
        loss, logits = self.cast(x)
        self.scaler.scale(loss).backward()
        return loss, logits


AROUND = [BF16, None, BF16, BF16, None, FP16, BF16, None, BF16, FP16]


def trained(rank, world, kind, captured):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    training = Training(mesh)
    function = getattr(training, kind)
    if captured:
        function = vd.capture(function)
    seen = []
    for step in range(STEPS):
        dtype = AROUND[step] if kind == "plain" else None
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss, logits = function(batch(step, mesh))
        if kind != "backward":
            training.scaler.scale(loss).backward()
        training.scaler.step(training.optimizer)
        training.scaler.update()
        training.optimizer.zero_grad()
        dtypes = loss.dtype, logits.dtype, logits.to_local().dtype
        seen.append((*dtypes, repr(loss.item()), training.scaler.get_scale()))
    whole = [p.detach().full_tensor() for p in training.model.parameters()]
    return seen, whole, len(function.programs) if captured else 0


def both(rank, world, kind):
    """In eager mode, and captured."""
    return trained(rank, world, kind, False), trained(rank, world, kind, True)


@pytest.mark.parametrize("kind", ["plain", "cast", "backward"])
def test_captured_training_is_that_of_eager(kind):
    for (eager, parameters, _), (seen, whole, programs) in run(both, 4, kind):
        assert seen == eager
        assert [scale for *_, scale in seen] == SCALES
        assert all(map(torch.equal, whole, parameters))
        # One for each state of autocast around it, else only one.
        assert programs == (3 if kind == "plain" else 1)
