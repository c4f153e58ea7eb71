"""Captured programs follow autocast and GradScaler: bit for bit eager's training.

Autocast around a captured function is guarded, inside it is recorded; scales are tensors, so that a
replay reads what the last one wrote. Where the scaler asks for a number in Python, it is called
again at each replay.
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

    def __init__(self, mesh, fused=True):
        self.model = network(mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=fused)
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

    def step(self, x):
        found = self.backward(x)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return found

    def clipped(self, x):
        found = self.backward(x)
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return found


# What is left to do after each.
AFTER = {"plain": "backward step", "cast": "backward step", "backward": "step"}
AROUND = [BF16, None, BF16, BF16, None, FP16, BF16, None, BF16, FP16]


def trained(rank, world, kind, captured, fused=True):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    training = Training(mesh, fused)
    function = getattr(training, kind)
    if captured:
        # Uncompared: the function itself makes state of a scaler anew, and is then recorded again.
        function = vd.capture(function, check=None)
    rest, seen = AFTER.get(kind, ""), []
    for step in range(STEPS):
        dtype = AROUND[step] if kind == "plain" else None
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss, logits = function(batch(step, mesh))
        if "backward" in rest:
            training.scaler.scale(loss).backward()
        if "step" in rest:
            training.scaler.step(training.optimizer)
            training.scaler.update()
        training.optimizer.zero_grad()
        dtypes = loss.dtype, logits.dtype, logits.to_local().dtype
        seen.append((*dtypes, repr(loss.item()), training.scaler.get_scale()))
    whole = [p.detach().full_tensor() for p in training.model.parameters()]
    return seen, whole, len(function.programs) if captured else 0


def both(rank, world, kind, fused=True):
    """In eager mode, and captured."""
    return trained(rank, world, kind, False, fused), trained(rank, world, kind, True, fused)


@pytest.mark.parametrize("kind", ["plain", "cast", "backward", "step", "clipped"])
def test_captured_training_is_that_of_eager(kind):
    for (eager, parameters, _), (seen, whole, programs) in run(both, 4, kind):
        assert seen == eager
        assert [scale for *_, scale in seen] == SCALES
        assert all(map(torch.equal, whole, parameters))
        # One for each state of autocast around it, else only one.
        assert programs == (3 if kind == "plain" else 1)


@pytest.mark.parametrize("kind", ["step", "clipped"])
def test_a_step_that_is_decided_in_python_is_called_again(kind):
    for (eager, parameters, _), (seen, whole, _) in run(both, 4, kind, False):
        assert seen == eager
        assert all(map(torch.equal, whole, parameters))
