"""What the data-parallel tests share: a batch divided over ranks, and arithmetic without rounding.

Weights, inputs and gradients are small multiples of powers of two in float64, and dropout scales
by 2 (p = 1/2) or 4: every sum is exact, whatever its order. So losses, gradients and parameters of
several ranks are compared with those of one device bit by bit.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

RANKS = 4
SEED = 3
WIDTH = 8
LENGTH = 4


def run(fn, *args, ranks=RANKS):
    """What `fn(rank, ranks, *args)` returns on each rank of real processes."""
    testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")
    return testing.run(fn, ranks, *args, timeout=200)


def rows_of(total, parts, index):
    """The rows of one part by the rule of `torch.chunk`: the last parts have fewer, or none."""
    size = -(-total // parts)
    return slice(min(index * size, total), min((index + 1) * size, total))


def batch(rows, width=WIDTH):
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-4, 5, (rows, LENGTH, width), generator=generator).double()


class Block(nn.Module):
    def __init__(self, width=WIDTH, inner=2 * WIDTH):
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.down(self.drop(F.relu(self.up(x)))))


class Model(nn.Module):
    """Two blocks with dropout inside and between; each may be recomputed in the backward."""

    def __init__(self, recompute=False, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.drop = nn.Dropout(0.5)
        self.recompute = recompute
        self.flattened = True

    def forward(self, x):
        x = self.drop(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        if not self.flattened:
            return self.drop(x)
        # As if the batch were flattened to tokens: rows come in groups.
        return 1 * self.drop(x.flatten(0, 1)).view(x.shape)


def exact(model):
    """Integer weights, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.copy_(values)
    return model.double()


def loss_of(output):
    """A loss for each row: what the rows of other ranks are plays no part."""
    return output.square().sum((1, 2)) * 2.0**-8


def one_device(make, totals, steps=2):
    """Losses of each row, gradients, parameters and generator of a training on one device.

    A step goes over batches of so many rows each, and adds their gradients up.
    """
    model = exact(make())
    torch.manual_seed(SEED)
    losses, gradients = [], []
    for _ in range(steps):
        for total in totals:
            rows = loss_of(model(batch(total)))
            losses.append(rows.detach())
            rows.sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        descend(model)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, gradients, parameters, torch.get_rng_state()


def descend(model):
    """Steps of one by the sign of the gradient: weights stay integers that are small."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad.sign())
            parameter.grad = None
