"""Random ops on sharded tensors send nothing, and leave every rank where one device is.

That their numbers are those of one device is proved with all other ops, in test_fuzz.
Draws whose parameters require grad have gradients of one device as well.
"""

from itertools import product

import numpy as np
import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import Replicate, Shard, StrictError

SILENT = {
    "exponential_": lambda x: x.exponential_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "random_": lambda x: x.random_(-3, 8),
    "bernoulli_": lambda x: x.bernoulli_(x.clone().sigmoid()),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.normal(x, x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2),
    "multinomial_with": lambda x: torch.multinomial(x.sigmoid(), 9, replacement=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.3, True),
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(-1), 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "rrelu_off": lambda x: F.rrelu(x, training=False),
}


@on_ranks(4)
def test_draws_send_nothing():
    mesh = device_mesh((2, 2), ("dp", "tp"))
    values = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    for name, op in SILENT.items():
        torch.manual_seed(3)
        expected = op(values.clone())
        after = torch.get_rng_state()
        x = vd.distribute_tensor(values.clone(), mesh, [Shard(0), Replicate()])
        torch.manual_seed(3)
        with vd.strict():
            found = op(x)
        assert torch.equal(torch.get_rng_state(), after), name
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-6, atol=0.0)


@on_ranks(4)
def test_what_depends_on_values_is_gathered_and_strict_mode_says_so():
    mesh = device_mesh((4,))
    x = vd.distribute_tensor(torch.rand(6, 4), mesh, [Shard(0)])
    for op in (torch.poisson, lambda t: F.rrelu(t, training=True)):
        with pytest.raises(StrictError), vd.strict():
            op(x)
        assert op(x).placements == (Replicate(),)


@on_ranks(4)
def test_factories_that_torch_has_not():
    mesh = device_mesh((2, 2), ("dp", "tp"))
    for placements in ([Shard(0), Replicate()], [Shard(0), Shard(0)], [Replicate(), Replicate()]):
        torch.manual_seed(3)
        expected = torch.randperm(11), torch.normal(1.0, 0.5, (11, 3))
        after = torch.get_rng_state()
        torch.manual_seed(3)
        with vd.strict():
            found = (
                vd.randperm(11, device_mesh=mesh, placements=placements),
                vd.normal(1.0, 0.5, (11, 3), device_mesh=mesh, placements=placements),
            )
        assert torch.equal(torch.get_rng_state(), after)
        for piece, whole in zip(found, expected, strict=True):
            assert torch.equal(piece.full_tensor(), whole)


GAPS = {
    "steps": lambda x: x[::2],
    "column": lambda x: x[:, 1],
    "half": lambda x: x.chunk(2, 1)[1],
    "small": lambda x: x[::20, 1],
    "rows": lambda x: x[4:20],
    "turned": lambda x: x.mT,
}
FILLS = {
    "normal_": lambda x: x.normal_(1.0, 0.5),
    "uniform_": lambda x: x.uniform_(),
    "exponential_": lambda x: x.exponential_(),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "geometric_": lambda x: x.geometric_(0.3),
    "random_": lambda x: x.random_(7),
}


def gaps(rank, world_size):
    mesh = device_mesh((2,), ("tp",))
    refused = []
    for view, of in GAPS.items():
        for name, fill in FILLS.items():
            for dim in (0, 1):
                plain = torch.zeros(38, 4)
                ours = vd.distribute_tensor(plain, mesh, [Shard(dim)])
                torch.manual_seed(3)
                fill(of(plain))
                after = torch.get_rng_state()
                torch.manual_seed(3)
                try:
                    fill(of(ours))
                except vd.UnsupportedError as error:
                    refused.append((view, name, dim, str(error)))
                    continue
                assert torch.equal(ours.full_tensor(), plain), (view, name, dim)
                assert torch.equal(torch.get_rng_state(), after), (view, name, dim)
    return refused


def test_draws_into_memory_with_gaps_are_one_devices_or_refused():
    first, second = run(gaps, 2)
    assert first == second
    words = [said for view, name, _, said in first if name == "normal_"]
    assert any("with gaps in memory" in said for said in words)
    # What is drawn one by one has one order; copies of views are refused by `written_views`.
    assert {view for view, name, _, _ in first if name == "normal_"} <= {"steps", "column", "half"}
    assert not [one for one in first if one[0] in ("small", "rows")]


ON_META = {
    "normal_": lambda x: x.normal_(),
    "kaiming_uniform_": torch.nn.init.kaiming_uniform_,
    "rand_like": torch.rand_like,
    "dropout": lambda x: F.dropout(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "bernoulli": torch.bernoulli,
    "bernoulli_": lambda x: x.bernoulli_(x),
    "normal": lambda x: torch.normal(x, 1.0),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "poisson": torch.poisson,
}


@on_ranks(2, simulated=True)
def test_nothing_is_drawn_on_meta():
    mesh = device_mesh((2,))
    x = vd.distribute_tensor(torch.empty(4, 6, device="meta"), mesh, [Shard(0)])
    before = torch.get_rng_state()
    for name, op in ON_META.items():
        found = op(x)
        assert found.is_meta, name
        assert found.shape == op(torch.empty(4, 6, device="meta")).shape, name
        assert torch.equal(torch.get_rng_state(), before), name


@on_ranks(2, simulated=True)
def test_probabilities_of_other_types():
    mesh = device_mesh((2,))
    for p in (True, np.float16(0.3), np.float32(0.3), 1):
        found = []
        for x in (torch.ones(8), vd.distribute_tensor(torch.ones(8), mesh, [Shard(0)])):
            torch.manual_seed(1)
            found.append(F.dropout(x, p))
        assert torch.equal(found[0], found[1].full_tensor()), p


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


@on_ranks(2, simulated=True)
def test_two_results_of_a_flat_shard():
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    expected = torch.native_dropout(x, 0.3, True)
    flat = vd.distribute_tensor(x, device_mesh((2,)), [vd.RaggedShard((0, 1), (2, 1))])
    torch.manual_seed(0)
    for mine, its in zip(torch.native_dropout(flat, 0.3, True), expected, strict=True):
        assert torch.equal(mine.full_tensor(), its)
