"""A rank without rows gathers and reduces the units of `zero` in the order of all others.

Also in the backward of a backward, as a gradient penalty has it, and where blocks are computed
again: torch may take another way through what is empty.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Plan, mesh, parallelize
from vescale_parallel._zero.schedule import zero_schedule_of

WIDTH = 4


class Attention(nn.Module):
    """What rows say to each other; the weights are asked for, as fused kernels are once derived."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=True)[0]


class Looked(nn.Module):
    """Adds rows of a table, by what the argument is; a rank may look nothing up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 3)

    def forward(self, x):
        return x + self.table((x.sum(-1) > 0).long())


MODULES = {
    "attention": Attention,
    "embedding": Looked,
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
    "group norm of one": lambda: nn.GroupNorm(1, WIDTH, affine=False),
    "instance norm": lambda: nn.InstanceNorm1d(WIDTH, affine=True),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "layer norm": lambda: nn.LayerNorm(3),
    "rms norm": lambda: nn.RMSNorm(3),
    "convolution": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "linear": lambda: nn.Linear(3, 3),
    "prelu": lambda: nn.PReLU(WIDTH),
    "gelu": lambda: nn.Sequential(nn.Linear(3, 3), nn.GELU()),
    "softmax": lambda: nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)),
    "pooled": lambda: nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), nn.MaxPool1d(3, 1, 1)),
    "all": lambda: nn.Sequential(
        nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH), nn.SiLU()
    ),
}


class Net(nn.Module):
    """Blocks between two layers; one number for each row."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.blocks = nn.ModuleList([nn.Sequential(MODULES[name](), nn.Tanh()) for _ in range(2)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).flatten(1).sum(1)


def slope(model, x):
    """The gradient with respect to rows, to be differentiated again."""
    (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return found


def plain(model, x):
    return model(x).square().sum()


def penalty(model, x):
    return slope(model, x).square().sum()


def critic(model, x):
    lengths = slope(model, x).flatten(1).norm(dim=1)
    return model(x.detach() + 1).mean() + 10 * (lengths - 1).square().mean()


def third(model, x):
    first = slope(model, x)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().sum() + model(x).sum()


LOSSES = {loss.__name__: loss for loss in (plain, penalty, critic, third)}


def trained(name, rows, losses, plan=None):
    """Gradients after each loss, and what was gathered and reduced."""
    torch.manual_seed(0)
    model, events = Net(name).double(), []
    x = torch.randn(rows, WIDTH, 3, dtype=torch.float64)
    if plan is not None:
        parallelize(model, mesh(dp=4, device_type="cpu"), plan)
        log = zero_schedule_of(model).log
        record = log.record
        log.record = lambda what: (events.append(what), record(what))[1]
    found = []
    for loss in losses:
        LOSSES[loss](model, x.clone().requires_grad_()).backward()
        found += [p.grad for p in model.parameters()]
        model.zero_grad()
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found], events


def compare(name, rows, losses, **how):
    plan = Plan(parameters={"*": "replicate"}, batch="dp:0", **how)
    want, _ = trained(name, rows, losses)

    def body(rank, world_size):
        found, events = trained(name, rows, losses, plan)
        torch.testing.assert_close(found, want)
        return events

    first, *others = simulate(4).run(body)
    assert first
    assert all(events == first for events in others)


def test_penalties():
    compare("group norm", 3, ["penalty", "critic"], zero=3)


@pytest.mark.parametrize(
    "name", ["group norm", "layer norm", "batch norm", "convolution", "embedding", "attention"]
)
def test_penalties_of_modules_that_are_computed_again(name):
    compare(name, 3, ["penalty"], zero=3, checkpoint={"blocks.*": "full"})


class Images(nn.Module):
    """Three blocks of a convolution, and the mean of what they make of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
            for _ in range(3)
        )
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def penalised(plan):
    torch.manual_seed(0)
    model, x = Images(), torch.randn(1, 4, 4, 4)
    if plan is not None:
        parallelize(model, mesh(dp=4, device_type="cpu"), plan)
    slope(model, x.requires_grad_()).square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def test_penalties_of_blocks_that_are_computed_again():
    """Backward comes to the last block past its output, and has to gather it all the same."""
    plan = Plan(parameters={"*": "replicate"}, batch="dp:0", zero=3, checkpoint="full")
    want = penalised(None)
    simulate(4).run(lambda *_: torch.testing.assert_close(penalised(plan), want))


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"zero": 3}, {"zero": 3, "checkpoint": {"blocks.*": "full"}}, {"zero": 2}], ids=str
)
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("name", MODULES)
def test_every_module(name, rows, how):
    # Ours is a composition of operations, of which torch's kernel has other third derivatives.
    losses = [one for one in LOSSES if (name, one) != ("batch norm", "third")]
    compare(name, rows, losses, **how)
