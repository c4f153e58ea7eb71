"""Optimizers and clipping on sharded parameters do what they do on one device, step by step."""

from __future__ import annotations

import copy
import warnings
from math import prod

import pytest
import torch
from torch import nn, optim
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, gradient_total

PLACED = {
    "line": [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0)]],
    "square": [
        [Shard(0), Shard(1)],
        [Replicate(), Shard(1)],
        [Shard(0), Replicate()],
        [Replicate(), Shard(0)],
    ],
}
MESHES = {"line": (4,), "square": (2, 2)}

OPTIMIZERS = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "nadam": (optim.NAdam, {"lr": 0.01}),
    "radam": (optim.RAdam, {"lr": 0.01}),
    "adamax": (optim.Adamax, {"lr": 0.01}),
    "adagrad": (optim.Adagrad, {"lr": 0.01}),
    "adadelta": (optim.Adadelta, {}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
    "asgd": (optim.ASGD, {"lr": 0.01}),
    "adafactor": (optim.Adafactor, {"lr": 0.01}),
    "maximize": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
}


def model():
    torch.manual_seed(3)
    shapes = [(5, 6), (6, 7), (3,), (2, 3)]
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]


def spread(parameters, mesh, placed):
    return [
        nn.Parameter(distribute_tensor(p.detach(), mesh, placements))
        for p, placements in zip(parameters, placed, strict=True)
    ]


def loss_of(parameters, step):
    a, b, c, d = parameters
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5) + step
    y = torch.tanh(x @ a @ b)
    return (y[:, :3] * c).square().mean() + (y.sum() + d.sum()).square() * 0.1


def train(parameters, optimizer, clip):
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(parameters, step).backward()
        if clip is not None:
            norms.append(clip(parameters))
        optimizer.step()
    return norms


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(mine, one):
    torch.testing.assert_close(full(mine).detach(), one.detach(), rtol=1e-9, atol=1e-9)


def check_optimizer(rank, world_size, mesh, placed, name, options):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind, fixed = OPTIMIZERS[name]
    mesh = device_mesh(mesh)
    dense = model()
    ours = spread(copy.deepcopy(dense), mesh, placed)
    one, mine = kind(dense, **fixed, **options), kind(ours, **fixed, **options)
    train(dense, one, None)
    train(ours, mine, None)
    for p, q in zip(ours, dense, strict=True):
        same(p, q)
        assert mine.state[p].keys() == one.state[q].keys()
        for key, value in one.state[q].items():
            if isinstance(value, torch.Tensor) and value.ndim:
                assert isinstance(mine.state[p][key], DTensor), key
                same(mine.state[p][key], value)


def check_clipping(rank, world_size, mesh, placed, options):
    mesh = device_mesh(mesh)
    dense = model()
    ours = spread(copy.deepcopy(dense), mesh, placed)

    def clip(parameters):
        return nn.utils.clip_grad_norm_(parameters, 0.5, **options)

    wanted = train(dense, optim.SGD(dense, lr=0.1), clip)
    found = train(ours, optim.SGD(ours, lr=0.1), clip)
    for mine, one in zip([*found, *ours], [*wanted, *dense], strict=True):
        same(mine, one)
    loss_of(dense, 7).backward()
    loss_of(ours, 7).backward()
    nn.utils.clip_grad_value_(dense, 0.01)
    nn.utils.clip_grad_value_(ours, 0.01)
    for p, q in zip(ours, dense, strict=True):
        same(gradient_total(p), q.grad)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(mesh, name):
    for options in ({"foreach": False}, {"foreach": True}):
        run(check_optimizer, prod(MESHES[mesh]), MESHES[mesh], PLACED[mesh], name, options)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "adagrad"])
def test_fused_optimizer(name):
    options = {"fused": True}
    run(check_optimizer, 4, MESHES["square"], PLACED["square"], name, options)


@pytest.mark.parametrize("mesh", MESHES)
def test_clipping(mesh):
    for options in (
        {},
        {"norm_type": 1.0},
        {"norm_type": float("inf")},
        {"foreach": True},
        {"foreach": False},
        {"error_if_nonfinite": True},
    ):
        run(check_clipping, prod(MESHES[mesh]), MESHES[mesh], PLACED[mesh], options)
