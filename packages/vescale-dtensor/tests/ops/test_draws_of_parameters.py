"""Draws whose parameters require grad are those of one device, and so are their gradients.

Policies sample from what they train: `Categorical(logits=...).sample()` and its relatives.
"""

from itertools import product

import numpy as np
import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_dtensor import Replicate, Shard

DRAWS = {
    "multinomial": lambda p: torch.multinomial(p, 2),
    "multinomial with replacement": lambda p: p.multinomial(7, replacement=True),
    "bernoulli": torch.bernoulli,
    "normal": lambda p: torch.normal(p, p),
    "normal of one std": lambda p: torch.normal(p, 1.0),
    "poisson": torch.poisson,
    "rand_like": torch.rand_like,
    "gumbel_softmax": F.gumbel_softmax,
    "rrelu": lambda p: F.rrelu(p, training=True),
    "Categorical of logits": lambda p: D.Categorical(logits=p).sample(),
    "Categorical of several": lambda p: D.Categorical(probs=p).sample((3,)),
    "Bernoulli": lambda p: D.Bernoulli(probs=p).sample(),
    "Normal": lambda p: D.Normal(p, p).rsample(),
    "Multinomial": lambda p: D.Multinomial(4, probs=p).sample(),
    "OneHotCategorical": lambda p: D.OneHotCategorical(probs=p).sample(),
    "Exponential": lambda p: D.Exponential(p).rsample(),
    "Gamma": lambda p: D.Gamma(p, p).rsample(),
    "Dirichlet": lambda p: D.Dirichlet(p).rsample(),
}
LAYOUTS = [Shard(0), Shard(1), Replicate()]


def drawn(name, parameter):
    """What is drawn, and the gradient of the parameter; None where torch records nothing."""
    torch.manual_seed(1)
    sample = DRAWS[name](parameter)
    if sample.requires_grad:
        (sample * 1.5).sum().backward()
    gradient = parameter.grad
    return [x if x is None else whole(x) for x in (sample, gradient)] + [sample.requires_grad]


def whole(x):
    return (x.full_tensor() if isinstance(x, vd.DTensor) else x).detach()


def on_a_mesh(rank, world_size, name, data):
    mesh = vd.init_device_mesh("cpu", (world_size,))
    return [
        drawn(name, vd.distribute_tensor(data, mesh, [layout]).requires_grad_())
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_one_device(name):
    data = torch.rand(5, 4, generator=torch.Generator().manual_seed(3)) * 0.8 + 0.1
    expected = drawn(name, data.clone().requires_grad_())
    for found in simulate(2).run(on_a_mesh, name, data)[0]:
        assert found[2] == expected[2]
        assert (found[1] is None) == (expected[1] is None)
        for mine, theirs in zip(found[:2], expected[:2], strict=True):
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


NUMBERS = {
    "complex randn_like": lambda x: torch.randn_like(x, dtype=torch.complex64),
    "complex normal_": lambda x: x.to(torch.complex64).normal_(1, 2),
    "native_dropout": lambda x: torch.native_dropout(x, np.float16(0.3), True)[0],
    "native_dropout of True": lambda x: torch.native_dropout(x, True, True)[0],
    "dropout": lambda x: F.dropout(x, np.float16(0.3)),
    "alpha_dropout": lambda x: F.alpha_dropout(x, np.float16(0.3), True),
    "dropout1d": lambda x: F.dropout1d(x, np.float16(0.3)),
    "bernoulli_": lambda x: x.clone().bernoulli_(True),
    "uniform_": lambda x: x.clone().uniform_(False, np.float16(2.3)),
    "normal_": lambda x: x.clone().normal_(True, True),
    "geometric_": lambda x: x.clone().geometric_(torch.tensor(0.3)),
    "randint_like": lambda x: torch.randint_like(x, torch.tensor(3)),
    "random_": lambda x: x.clone().random_(np.int16(3)),
}


def numbers(rank, world_size, data):
    mesh, faults = vd.init_device_mesh("cpu", (world_size,)), []
    for (name, draw), dim in product(NUMBERS.items(), (0, 1)):
        torch.manual_seed(1)
        expected, after = draw(data.clone()), torch.get_rng_state()
        torch.manual_seed(1)
        found = draw(vd.distribute_tensor(data, mesh, [Shard(dim)])).full_tensor()
        if not torch.allclose(found, expected) or not torch.equal(after, torch.get_rng_state()):
            faults.append((name, dim))
    return faults


def test_numbers_of_other_kinds_are_those_of_one_device():
    data = torch.rand(5, 4, generator=torch.Generator().manual_seed(3))
    for faults in simulate(3).run(numbers, data):
        assert not faults
