"""A captured model trains bit for bit as it does in eager: 50 steps, dropout, AdamW, 1 and 4 ranks.

Each case builds a model twice from one seed, trains one in eager and one captured, and compares
losses, parameters, gradients and the random generator after every step.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Replicate, Shard

STEPS = 10


class Block(nn.Module):
    """Attention and a gated layer, with dropout in both and a hook that scales."""

    def __init__(self, size=12, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))
        self.up.register_forward_hook(lambda module, args, result: result * 1.5)

    def forward(self, x):
        self.seen.add_(1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(x))))


def built(mesh, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block())
    if mesh.ndim == 2:
        for block in model:
            for linear, dim in ((block.up, 0), (block.down, 1)):
                weight = vd.distribute_tensor(
                    linear.weight.detach(), mesh, [Replicate(), Shard(dim)]
                )
                linear.weight = nn.Parameter(weight)
    return vd.distribute_module(model, mesh)


def batch(mesh, step):
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(5, 6, 12, generator=generator)
    layout = [Shard(0), Replicate()] if mesh.ndim == 2 else [Shard(0)]
    return vd.distribute_tensor(rows, mesh, layout, src_data_rank=None)


def mesh_of(world_size):
    return device_mesh((2, 2), ("dp", "tp")) if world_size == 4 else device_mesh((1,), ("dp",))


def alike(model, twin):
    for name, value in model.state_dict().items():
        other = twin.state_dict()[name]
        assert value.placements == other.placements, name
        assert torch.equal(value._local_tensor, other._local_tensor), name
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None:
            assert one.grad.placements == two.grad.placements
            assert torch.equal(one.grad._local_tensor, two.grad._local_tensor)


def train(mesh, eager, captured, model, twin, steps=STEPS):
    """Run both step functions on the same batches and the same numbers, and compare."""
    for step in range(steps):
        torch.manual_seed(1000 + step)
        expected = eager(batch(mesh, step))
        after = torch.get_rng_state()
        torch.manual_seed(1000 + step)
        found = captured(batch(mesh, step))
        assert torch.equal(after, torch.get_rng_state()), step
        assert found.placements == expected.placements
        assert torch.equal(found._local_tensor, expected._local_tensor), step
        alike(model, twin)


def optimizer_outside(rank, world_size):
    mesh = mesh_of(world_size)
    model, twin = built(mesh), built(mesh)
    captured = vd.capture(model)

    def stepper(forward, parameters):
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)

        def step(x):
            optimizer.zero_grad()
            loss = forward(x).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            return loss.detach()

        return step

    eager = stepper(twin, list(twin.parameters()))
    train(mesh, eager, stepper(captured, list(model.parameters())), model, twin)
    assert len(captured.programs) == 1


def backward_inside(rank, world_size):
    """All of a step is captured but the optimizer's: forward, loss, backward, clipping."""
    mesh = mesh_of(world_size)
    model, twin = built(mesh), built(mesh)

    def stepper(module, wrap):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)

        def gradients(x):
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            return loss.detach()

        wrapped = wrap(gradients)

        def step(x):
            loss = wrapped(x)
            optimizer.step()
            return loss

        return step, wrapped

    (eager, _), (step, captured) = stepper(twin, lambda f: f), stepper(model, vd.capture)
    train(mesh, eager, step, model, twin)
    assert 1 <= len(captured.programs) <= 2  # gradients are there, or not


def accumulation(rank, world_size):
    """Two micro-batches before each step: gradients that are there are added to."""
    mesh = mesh_of(world_size)
    model, twin = built(mesh), built(mesh)

    def stepper(module):
        def step(x):
            loss = module(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    captured, eager = vd.capture(stepper(model)), stepper(twin)
    for _ in range(3):
        model.zero_grad(), twin.zero_grad()
        train(mesh, eager, captured, model, twin, steps=3)
    assert len(captured.programs) == 2  # gradients were None, or not


def evaluation_between(rank, world_size):
    mesh = mesh_of(world_size)
    model = built(mesh)
    captured, twin = vd.capture(model), copy.deepcopy(model)
    for step in range(4):
        for training in (True, False):
            model.train(training), twin.train(training)
            with torch.set_grad_enabled(training):
                torch.manual_seed(step)
                expected = twin(batch(mesh, step))
                torch.manual_seed(step)
                assert torch.equal(
                    captured(batch(mesh, step))._local_tensor, expected._local_tensor
                )
    assert len(captured.programs) == 2


CASES = [optimizer_outside, backward_inside, accumulation, evaluation_between]


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bitwise_as_eager(case, world_size):
    run(case, world_size, timeout=240)
