"""What enters a program differently on one rank is named on every rank, before it is trained with.

Factories and `distribute_tensor` of another shape, dtype, layout or other values; and random
numbers that torch draws in calls without a rule, on every rank for itself.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm import testing
from vescale_comm.testing import device_mesh
from vescale_dtensor import Replicate, Shard, distribute_tensor

SIZE = 3


def replicated():
    return vd.ones(4, 4, device_mesh=device_mesh((SIZE,)), placements=[Replicate()])


def distributed(given, placements, source):
    return distribute_tensor(given, device_mesh((SIZE,)), placements, src_data_rank=source)


def lstm():
    made = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    with torch.no_grad():
        for weight in made.parameters():
            weight.fill_(0.5)
    return vd.distribute_module(made, device_mesh((SIZE,)))


DRAWS = {
    "rrelu": lambda: F.rrelu(-replicated(), training=True),
    "poisson": lambda: torch.poisson(replicated()),
    "binomial": lambda: torch.binomial(5 * replicated(), 0.5 * replicated()),
    "a generator": lambda: torch.poisson(
        replicated(), torch.Generator().manual_seed(torch.initial_seed())
    ),
    "layers of an lstm": lambda: lstm()(replicated()),
    "beta": lambda: torch.distributions.Beta(replicated(), replicated()).sample(),
    "svd_lowrank": lambda: torch.svd_lowrank(replicated(), 2)[1],
    "fractional pooling": lambda: F.fractional_max_pool2d(replicated()[None], 2, output_size=2),
}


def draws_of_other_seeds(rank, _, name):
    torch.manual_seed(rank)
    DRAWS[name]()


@pytest.mark.parametrize("name", list(DRAWS))
def test_other_seeds_show_at_draws_without_a_rule(name):
    for outcome in testing.outcomes(draws_of_other_seeds, SIZE, name, timeout=60):
        assert outcome.type_name == "CommMismatchError"
        assert "rank 1: draws random numbers with a generator in state" in outcome.message


def no_draw(rank, _):
    """A call without a rule that draws nothing is no event, whatever the seeds are."""
    torch.manual_seed(rank)
    assert torch.equal(
        torch.linalg.matrix_exp(replicated()).to_local(), torch.ones(4, 4).matrix_exp()
    )


def test_nothing_is_said_where_nothing_is_drawn():
    testing.run(no_draw, SIZE, timeout=60)


DIFFERING = {
    "factory": lambda bad: vd.ones(
        5 if bad else 4, 4, device_mesh=device_mesh((SIZE,)), placements=[Shard(0)]
    ),
    "shape": lambda bad: distributed(torch.ones(5 if bad else 4), [Shard(0)], 0),
    "number of dims": lambda bad: distributed(torch.ones(() if bad else (1,)), [Replicate()], 0),
    "dtype": lambda bad: distributed(torch.ones(4).to(torch.double if bad else None), None, 0),
    "layout": lambda bad: distributed(torch.ones(4, 4), [Shard(int(bad))], 0),
    "source": lambda bad: distributed(torch.ones(4), [Shard(0)], int(bad)),
    "shape, nothing sent": lambda bad: distributed(torch.ones(5 if bad else 4), [Shard(0)], None),
    "values, nothing sent": lambda bad: distributed(torch.full((4,), 1.0 + bad), [Shard(0)], None),
}


def entering(rank, _, name):
    (DIFFERING[name](rank == 1) * 2).sum().item()


@pytest.mark.parametrize("name", list(DIFFERING))
def test_what_enters_differently_is_named(name):
    for outcome in testing.outcomes(entering, SIZE, name, timeout=60):
        assert outcome.type_name == "CommMismatchError"
        assert "  rank 1: " in outcome.message
        assert "  ranks 0, 2: " in outcome.message


def other_meshes(rank, _, name):
    """Torch's own function waits for groups that the other ranks never make."""
    if name == "sizes":
        vd.init_device_mesh("cpu", (2, 2) if rank == 1 else (4,))
    elif name == "order":
        vd.init_device_mesh("cpu", (1, 4) if rank == 1 else (4, 1))
    else:
        names = ("tp", "dp") if rank == 1 else ("dp", "tp")
        vd.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


@pytest.mark.parametrize("name", ["sizes", "order", "names"])
def test_meshes_that_differ_are_named_before_a_group_is_made(name):
    for outcome in testing.outcomes(other_meshes, 4, name, timeout=60):
        assert outcome.type_name == "CommMismatchError"
        assert "  rank 1: makes a mesh cpu [" in outcome.message
        assert "  ranks 0, 2, 3: makes a mesh cpu [" in outcome.message
