"""Property: inside `consistent()`, torch's own DTensor draws what one device draws.

Most cases play the ranks one after another by torch's fake process group; what communicates runs
in a simulation, and in real processes. Outside the block everything is as before.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import tensor as dt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale_rng import LayoutError, RngError, use
from vescale_rng._torch_dtensor import hooks
from vescale_rng.torch_dtensor import consistent

RANKS = 4
PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(1)),
    (_StridedShard(0, split_factor=2), Shard(0)),
]
IN_PLACE = {
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1.0, 0.5),
    "log_normal_": lambda x: x.log_normal_(),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "exponential_": lambda x: x.exponential_(2.0),
    "geometric_": lambda x: x.geometric_(0.2),
    "cauchy_": lambda x: x.cauchy_(),
    "random_": lambda x: x.random_(),
    "random_to": lambda x: x.random_(10),
    "random_from": lambda x: x.random_(-5, 7),
    "kaiming": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "xavier": lambda x: nn.init.xavier_normal_(x),
}
NEW = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 10),
    "randint_like_low": lambda x: torch.randint_like(x, -3, 10),
    "dropout": lambda x: F.dropout(x, 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "native_mask": lambda x: torch.native_dropout(x, 0.4, True)[1],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_each": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "normal_mean": lambda x: torch.normal(x, 0.5),
    "normal_std": lambda x: torch.normal(0.5, x.sigmoid()),
    "normal_both": lambda x: torch.normal(x, x.sigmoid()),
}


@pytest.fixture(params=range(RANKS))
def mesh(request):
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()
    # A process has one rank for good, and torch keeps meshes (with their coordinate) in its caches.
    debug._clear_sharding_prop_cache()


def check(run, x, mesh, placements):
    """Compare `run` on a tensor and on its DTensor, and the generators after it."""
    torch.manual_seed(3)
    expected = run(x.clone())
    after = torch.get_rng_state()
    piece = distribute_tensor(x.clone(), mesh, placements, src_data_rank=None)
    torch.manual_seed(3)
    with consistent():
        found = run(piece)
    assert isinstance(found, DTensor)
    assert torch.equal(torch.get_rng_state(), after)
    # torch cuts the expected tensor itself.
    cut = distribute_tensor(expected.detach(), mesh, found.placements, src_data_rank=None)
    assert torch.equal(found.to_local(), cut.to_local())
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("name", [*IN_PLACE, *NEW])
@pytest.mark.parametrize("shape", [(8, 6), (5, 3)])
def test_every_op_on_every_rank(mesh, shape, name):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for placements in PLACEMENTS:
        check(IN_PLACE.get(name) or NEW[name], x, mesh, placements)


def test_a_tensor_of_another_memory_order(mesh):
    for name in ("uniform_", "normal_", "dropout", "rand_like", "bernoulli"):
        x = torch.randn(6, 8).t()
        check(IN_PLACE.get(name) or NEW[name], x, mesh, (Shard(0), Shard(1)))


@pytest.mark.parametrize("placements", PLACEMENTS[:3])
def test_factories(mesh, placements):
    for make, single in ((dt.rand, torch.rand), (dt.randn, torch.randn)):
        torch.manual_seed(3)
        expected = single(5, 6)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        with consistent():
            found = make(5, 6, device_mesh=mesh, placements=placements, requires_grad=True)
            # Others are made as ever.
            ones = dt.ones(5, 6, device_mesh=mesh, placements=placements)
        assert torch.equal(torch.get_rng_state(), after)
        cut = distribute_tensor(expected, mesh, placements, src_data_rank=None)
        assert torch.equal(found.to_local(), cut.to_local())
        assert found.requires_grad
        assert found.is_leaf
        assert bool((ones.to_local() == 1).all())


def test_gradients_of_dropout(mesh):
    x = torch.randn(8, 6)
    torch.manual_seed(3)
    whole = x.clone().requires_grad_()
    F.dropout(whole, 0.4).square().sum().backward()
    piece = distribute_tensor(x, mesh, (Shard(0), Shard(1)), src_data_rank=None).requires_grad_()
    torch.manual_seed(3)
    with consistent():
        F.dropout(piece, 0.4).square().backward(torch.ones_like(piece))
    cut = distribute_tensor(whole.grad, mesh, (Shard(0), Shard(1)), src_data_rank=None)
    assert torch.equal(piece.grad.to_local(), cut.to_local())


def test_partial_is_refused_in_words(mesh):
    partial = DTensor.from_local(torch.zeros(4), mesh, (Partial(), Replicate()))
    with consistent(), pytest.raises(LayoutError, match="Redistribute it"):
        partial.normal_()


def test_nothing_is_left_behind(mesh):
    handlers = DTensor._op_dispatcher._custom_op_handlers
    checkpoints = dict(vars(torch.utils.checkpoint))
    before, helper = dict(handlers), dt._api._dtensor_init_helper
    truncated = getattr(nn.init, "_no_grad_trunc_normal_", None)
    with pytest.raises(KeyError), consistent(), consistent():
        raise KeyError(handlers == before)
    assert handlers == before
    assert dt._api._dtensor_init_helper is helper
    assert vars(torch.utils.checkpoint) == checkpoints
    assert getattr(nn.init, "_no_grad_trunc_normal_", None) is truncated
    # Stock DTensor again, whose C++ side has seen the ops inside the block: a shard draws for
    # itself.
    piece = distribute_tensor(torch.zeros(8), mesh, (Shard(0), Shard(0)), src_data_rank=None)
    with consistent():
        piece.normal_()
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="may not have complete support"):
        piece.normal_()
    torch.manual_seed(3)
    assert torch.equal(piece.to_local(), torch.empty(2).normal_())


PLACES = {
    "FRAMES": torch.utils.checkpoint,
    "REENTRANT": torch.utils.checkpoint,
    "TRUNCATED": nn.init,
    "BORN": dt._api,
}


@pytest.mark.parametrize("kept", [False, True], ids=["gone", "no longer called"])
@pytest.mark.parametrize("hook", PLACES)
def test_a_torch_that_calls_other_functions_is_refused(monkeypatch, hook, kept):
    place = PLACES[hook]
    if kept:  # as torch 2.14 kept the function that `checkpoint` had called before
        monkeypatch.setattr(place, "_former", lambda *args: None, raising=False)
    monkeypatch.setattr(hooks, hook, "_former")
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    there = [dict(vars(one)) for one in PLACES.values()]
    for _ in range(2):  # also at the second try
        with pytest.raises(RngError, match=r"does not call torch.*\._former"), consistent():
            pass
    assert DTensor._op_dispatcher._custom_op_handlers == handlers
    assert [vars(one) for one in PLACES.values()] == there
    monkeypatch.undo()
    with consistent():
        assert hook


def test_policy_is_that_in_force(mesh):
    piece = distribute_tensor(torch.zeros(8), mesh, (Shard(0), Shard(0)), src_data_rank=None)
    with consistent(), use("native"):
        assert piece.uniform_() is piece


COMMUNICATING = {
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2),
    "multinomial_replacement": lambda x: torch.multinomial(x.sigmoid(), 5, replacement=True),
    "poisson": lambda x: torch.poisson(x.abs() * 5),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9.0), x.sigmoid()),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.4, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, tau=0.7),
    "trunc_normal": lambda x: nn.init.trunc_normal_(torch.empty_like(x), std=1.0),
}


def communicate(rank, world_size, names, several):
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    for placements in several:
        for name in names:
            run = COMMUNICATING[name]
            torch.manual_seed(3)
            expected = run(x)
            after = torch.get_rng_state()
            torch.manual_seed(3)
            with consistent():
                found = run(distribute_tensor(x, mesh, placements))
            assert torch.equal(torch.get_rng_state(), after), name
            torch.testing.assert_close(
                found.full_tensor(), expected, rtol=1e-6 * (name == "gumbel"), atol=0.0
            )
    leaf = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
    with consistent():
        F.rrelu(leaf, 0.1, 0.4, training=False)
    return rank


def test_what_communicates():
    comm = pytest.importorskip("vescale_comm", reason="vescale-comm is not installed")
    several = ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Shard(0)))
    assert comm.simulate(4).run(communicate, [*COMMUNICATING], several) == [0, 1, 2, 3]


def test_what_communicates_in_real_processes():
    testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")
    names = ["multinomial", "poisson", "trunc_normal"]
    assert testing.run(communicate, 4, names, ((Shard(0), Shard(1)),)) == [0, 1, 2, 3]
