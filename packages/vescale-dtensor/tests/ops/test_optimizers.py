"""Optimizers and clipping on sharded parameters do what they do on one device, step by step.
A fused step changes the tensors that it was given, in whatever layouts these are. A kernel of local
tensors has every list in its parameter's layout. What was redistributed for it is written back;
what cannot be written is refused, as are lists of different lengths.
"""

from __future__ import annotations

import copy
import warnings
from math import prod

import pytest
import torch
import vescale_dtensor as vd
from on_mesh import on_mesh
from torch import nn, optim
from vescale_comm import simulate
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


LAYOUTS = {
    "R": [Replicate(), Replicate()],
    "S": [Shard(0), Replicate()],
    "SS": [Shard(0), Shard(0)],
    "C": [Replicate(), Shard(1)],
    "P": [vd.Partial(), Replicate()],
    "plain": None,
}
# Layouts of parameters, gradients, first and second moments. Shards of five rows are uneven, and
# those of one row are empty on some ranks.
TABLE = ["S S SS S", "R S S P", "S plain C R", "C P SS S", "plain S R R", "S R S plain", "R R P R"]
HOW = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}


def given(shape, names, mesh):
    """The lists of a step of Adam with two parameters; `mesh` is None for one device."""
    draw = torch.Generator().manual_seed(5)

    def placed(name):
        tensor = torch.rand(shape, generator=draw) + 0.5
        at = LAYOUTS[name]
        return tensor if mesh is None or at is None else distribute_tensor(tensor, mesh, at)

    first, *rest = names.split()
    lists = [[placed(name), placed(first)] for name in (first, *rest, rest[-1])]
    return [*lists, [torch.ones(()), torch.ones(())]]


def stepped(shape, names, mesh, scale):
    lists = given(shape, names, mesh)
    unscaled = {} if scale is None else {"grad_scale": torch.tensor(scale)}
    unscaled |= {} if scale is None else {"found_inf": torch.zeros(())}
    with torch.no_grad():
        for rate in (0.1, 0.2):
            torch._fused_adam_(*lists, lr=rate, amsgrad=True, **HOW, **unscaled)
    return [[t.full_tensor() if isinstance(t, vd.DTensor) else t for t in each] for each in lists]


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("names", TABLE)
def test_a_step_updates_what_it_was_given(names, scale):
    def run(mesh):
        for shape in ((5, 3), (1, 2)):
            expected = stepped(shape, names, None, scale)
            torch.testing.assert_close(stepped(shape, names, mesh, scale), expected)

    on_mesh((2, 2), run)


def test_a_state_that_is_a_copied_view_is_refused():
    def run(mesh):
        base = distribute_tensor(torch.ones(3, 2), mesh, LAYOUTS["SS"])
        view = base.view(-1)
        lists = [[distribute_tensor(torch.ones(6), mesh, view.placements)] for _ in range(4)]
        steps = [torch.ones(())]
        with torch.no_grad():
            torch._fused_adam_(*lists, [], steps, lr=0.1, amsgrad=False, **HOW)  # is stored
            lists[2] = [view]
            with pytest.raises(vd.UnsupportedError, match="copy"):
                torch._fused_adam_(*lists, [], steps, lr=0.1, amsgrad=False, **HOW)

    on_mesh((2, 2), run)


@pytest.mark.parametrize("short", [1, 2, 5])
def test_lists_of_different_lengths_are_torchs_error(short):
    def run(rank, world_size):
        lists = given((5, 3), "R R R R", vd.init_device_mesh("cpu", (2, 2)))
        lists[short] = lists[short][:1]
        with torch.no_grad(), pytest.raises(RuntimeError, match="n_tensors"):
            torch._fused_adam_(*lists, lr=0.1, amsgrad=True, **HOW)

    plain = given((5, 3), "R R R R", None)
    plain[short] = plain[short][:1]
    with torch.no_grad(), pytest.raises(RuntimeError, match="n_tensors"):
        torch._fused_adam_(*plain, lr=0.1, amsgrad=True, **HOW)
    simulate(4)(run)
