"""A DTensor is one tensor: values are global or an error, and nothing rank-local leaves unnoticed.

Every case runs on four processes, mesh dp=2 x tp=2; it raises where the promise does not hold.
"""

import copy

import numpy as np
import pytest
import torch
import vescale_dtensor as vd
from named_cases import named_cases
from torch import nn
from vescale_comm import trace
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import LayoutError, Partial, RaggedShard, Replicate, Shard, UnsupportedError

CASES, case = named_cases()
GLOBAL = torch.arange(24.0).reshape(6, 4)


def placed(mesh, tensor=GLOBAL, dp=None, tp=None, grad=False):
    dp, tp = dp or Shard(0), tp or Shard(1)
    leaf = tensor.clone().requires_grad_(grad)
    return vd.distribute_tensor(leaf, mesh, [dp, tp], src_data_rank=None)


@case
def python_values_are_global(mesh):
    x = placed(mesh)
    assert x.sum().item() == 276.0
    assert float(x.mean()) == 11.5
    assert int(x.max()) == 23
    assert bool(x.sum() > 100)
    assert x.tolist() == GLOBAL.tolist()
    assert 5.0 in x
    assert 99.0 not in x
    assert np.array_equal(x.numpy(), GLOBAL.numpy())
    assert np.array_equal(np.asarray(x), GLOBAL.numpy())
    assert f"{x.sum():.2f}" == "276.00"
    assert torch.tensor([x.sum(), x.sum()]).tolist() == [276.0, 276.0]


@case
def metadata_is_global_and_free(mesh):
    x = placed(mesh)
    with trace() as traced:
        assert x.shape == (6, 4)
        assert (x.ndim, x.numel(), x.size(0), len(x), x.stride()) == (2, 24, 6, 6, (4, 1))
        assert x.dtype == torch.float32
        assert x.nbytes == 96
        assert x.is_contiguous()
        assert not x.t().is_contiguous()
        assert x.t().stride() == (1, 4)
        assert torch.is_tensor(x)
        assert repr(x) == str(x) == "DTensor(f32[6@dp, 4@tp])"
        assert repr(x.sum()) == "DTensor(f32[], +dp, +tp)"
    assert traced.counts() == {}


@case
def in_place_returns_the_same_wrapper(mesh):
    x = placed(mesh)
    assert x.add_(1) is x
    y = x
    y *= 2
    assert y is x
    assert torch.mul(x, 2, out=x) is x
    assert torch.equal(x.full_tensor(), (GLOBAL + 1) * 4)
    x[0:3] = 0.0
    assert x.sum().item() == ((GLOBAL + 1) * 4)[3:].sum().item()


@case
def a_write_to_a_view_sends_nothing(mesh):
    x, wanted = placed(mesh), GLOBAL.clone()
    with trace() as traced:
        x[1:4].zero_()
        x[2, 1:] = 7.0
        x.view(-1).add_(1)
        x.view(2, 3, 4)[1].mul_(3)
    assert traced.counts() == {}
    wanted[1:4] = 0.0
    wanted[2, 1:] = 7.0
    wanted.view(-1).add_(1)
    wanted.view(2, 3, 4)[1].mul_(3)
    assert torch.equal(x.full_tensor(), wanted)
    x.view(-1)[3].zero_()  # no dim is left to say which rank has it
    wanted.view(-1)[3].zero_()
    assert torch.equal(x.full_tensor(), wanted)
    x.flatten().clone().zero_()
    assert torch.equal(x.full_tensor(), wanted)


@case
def sequences_of_tensors_may_be_lists_or_tuples(mesh):
    x = placed(mesh)
    for _ in range(3):  # the first call, and calls that are known by then
        for kind in (list, tuple):
            for join in (torch.cat, torch.stack):
                assert torch.equal(join(kind((x, -x)), 1).full_tensor(), join((GLOBAL, -GLOBAL), 1))


@case
def plain_tensors_count_as_replicated(mesh):
    x = placed(mesh)
    assert torch.equal((x * GLOBAL).full_tensor(), GLOBAL * GLOBAL)
    assert torch.equal((GLOBAL[0] + x).full_tensor(), GLOBAL + GLOBAL[0])
    assert torch.equal(torch.zeros(6, 4).copy_(x), GLOBAL)


@case
def the_caller_keeps_his_tensors(mesh):
    mine = GLOBAL.clone().requires_grad_()
    for placements in ([Replicate(), Replicate()], [Shard(0), Shard(1)]):
        made = vd.distribute_tensor(mine, mesh, placements)
        with torch.no_grad():
            made.add_(1)
        made.sum().backward()
    plain = GLOBAL.clone()
    vd.DTensor.from_local(plain, mesh, [Replicate(), Replicate()]).requires_grad_()
    assert torch.equal(mine, GLOBAL)
    assert mine.grad is None
    assert not plain.requires_grad


@case
def broadcast_from_the_first_rank(mesh):
    different = GLOBAL + torch.distributed.get_rank()
    made = vd.distribute_tensor(different, mesh, [Shard(0), Replicate()])
    assert torch.equal(made.full_tensor(), GLOBAL)


@case
def deepcopy_copies_what_one_device_copies(mesh):
    parameter = nn.Parameter(placed(mesh, dp=Replicate(), grad=True))
    leaf = placed(mesh, dp=Replicate(), grad=True)
    for one in (parameter, leaf):
        (one * placed(mesh)).sum().backward()
    twin, other = copy.deepcopy(parameter), copy.deepcopy(leaf)
    assert isinstance(twin, nn.Parameter)
    assert not isinstance(other, nn.Parameter)
    assert twin.grad is None  # as of torch's own parameters
    assert torch.equal(other.grad.full_tensor(), GLOBAL)
    with torch.no_grad():
        twin.zero_()
    assert torch.equal(parameter.full_tensor(), GLOBAL)
    copied = placed(mesh).view(-1)  # a copy that stands for a view; its own copy does not
    copy.deepcopy(copied).zero_()


@case
def modules_load_convert_and_tie(mesh):
    module = nn.Linear(4, 6)
    twin = copy.deepcopy(module)
    module.weight = nn.Parameter(placed(mesh, module.weight.detach()))
    module.bias = nn.Parameter(placed(mesh, module.bias.detach(), tp=Replicate()))
    weight = module.weight
    module.load_state_dict(twin.state_dict())
    assert torch.equal(module.weight.full_tensor(), twin.weight)
    twin.load_state_dict({k: v.full_tensor() for k, v in module.state_dict().items()})
    module.to(torch.float64)
    assert module.weight is weight
    assert module.weight.dtype == torch.float64
    assert torch.allclose(module(GLOBAL.double()).full_tensor(), twin.double()(GLOBAL.double()))


@case
def wrong_layouts_are_named(mesh):
    with pytest.raises(LayoutError, match="give one per mesh axis, 2 in all"):
        vd.distribute_tensor(GLOBAL, mesh, [Shard(0)])
    with pytest.raises(LayoutError, match="the tensor has 2 dims"):
        vd.distribute_tensor(GLOBAL, mesh, [Shard(2), Replicate()])
    with pytest.raises(LayoutError, match="Pass the true global shape"):
        vd.DTensor.from_local(GLOBAL, mesh, [Shard(0), Shard(1)], shape=(6, 4))
    with pytest.raises(LayoutError, match="no such reduction"):
        Partial("median")
    with pytest.raises(UnsupportedError, match="terms of a sum"):
        placed(mesh).sum().__vescale_layout__()


@case
def an_error_of_values_is_raised_where_they_are(mesh):
    """As docs/limits.md says: by the ranks that hold them; nobody is given a wrong number."""
    logits, target = torch.zeros(6, 4), torch.tensor([9, 0, 1, 2, 3, 0])
    x, y = placed(mesh, logits, tp=Replicate()), placed(mesh, target, tp=Replicate())
    if mesh.get_coordinate()[0] == 0:
        with pytest.raises(IndexError):
            torch.nn.functional.cross_entropy(x, y, reduction="none")
    else:
        assert torch.nn.functional.cross_entropy(x, y, reduction="none").to_local().shape == (3,)


@case
def torch_placements_are_accepted(mesh):
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    x = vd.distribute_tensor(GLOBAL, mesh, [TorchShard(-1), TorchReplicate()])
    assert x.placements == (Shard(1), Replicate())
    assert x.redistribute(placements=[TorchReplicate(), TorchShard(0)]).placements[1] == Shard(0)


@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_semantics(name):
    CASES[name](device_mesh((2, 2), ("dp", "tp")))


@pytest.mark.smoke
def test_placements_of_different_kinds_are_never_equal():
    kinds = [Shard(0), Replicate(), Partial(), Partial("avg"), RaggedShard((0,), (1, 1))]
    assert len(set(kinds)) == len(kinds)
    assert Shard(0) == Shard(0)
    assert RaggedShard((0,), (2, 4)) == RaggedShard((0,), (1, 2))
    assert Shard(0) == torch.distributed.tensor.Shard(0)  # the same kind, made elsewhere
    assert Shard(0) != torch.distributed.tensor.Replicate()


@pytest.mark.smoke
@on_ranks(1)
def test_one_process_is_a_mesh_too():
    mesh = device_mesh((1,), ("dp",))
    x = vd.distribute_tensor(GLOBAL.clone().requires_grad_(), mesh, [Shard(0)])
    (x * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((6, 4), 2.0))
