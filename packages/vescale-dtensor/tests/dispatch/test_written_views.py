"""A write to the diagonal of a sharded tensor goes into the tensor; what cannot be is refused.

A write to a tensor with expanded dims is refused on every rank where one device refuses it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from on_mesh import on_mesh
from one_device import Place, check
from torch import nn
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import (
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    UnsupportedError,
    distribute_tensor,
)

X = torch.arange(60.0).reshape(3, 5, 4)
LAYOUTS = (
    (Shard(0), Shard(1)),
    (Shard(1), Shard(2)),
    (Shard(2), vd.Replicate()),
    (Shard(1), Shard(1)),
    (Partial(), Shard(1)),
)
WRITES = {
    "fill_": lambda d: d.fill_(-1.0),
    "zero_": lambda d: d.zero_(),
    "add_": lambda d: d.add_(1),
    "add_ of a tensor": lambda d: d.add_(d.detach().clone() * 2),
    "copy_": lambda d: d.copy_(torch.ones(d.shape)),
    "sign_": lambda d: d.sign_(),
    "mul_ twice": lambda d: d.mul_(2).mul_(3),
}


def written(place, layout, name):
    x = place(X, *layout)
    found = []
    for options in ({"dim1": -2, "dim2": -1}, {"offset": 1, "dim1": 1, "dim2": 2}, {"offset": -1}):
        diagonal = torch.diagonal(x, **options) if "dim1" in options else x.diagonal(-1)
        returned = WRITES[name](diagonal)
        assert returned is diagonal
        found += [diagonal.clone(), x.clone()]
        del diagonal, returned
    return found


@pytest.mark.parametrize("name", WRITES)
@on_ranks(4, simulated=True)
def test_as_on_one_device(name):
    for layout in LAYOUTS:
        for _ in range(2):
            check(lambda place: written(place, layout, name))  # noqa: B023


@on_ranks(4, simulated=True)
def test_a_write_that_another_view_or_autograd_should_see_is_refused():
    place = Place(device_mesh((2, 2), ("dp", "tp")))
    x = place(X, Shard(1), Shard(2))
    first, second = x.diagonal(), x.diagonal(1)
    with pytest.raises(UnsupportedError, match="forced a copy"):
        first.fill_(1.0)
    del second
    first.fill_(1.0)
    wanted = place(X, Shard(1), Shard(2), grad=True) * 1
    with pytest.raises(UnsupportedError, match="forced a copy"):
        wanted.diagonal().fill_(1.0)


MATRIX = torch.arange(42.0).reshape(7, 6)
UNITS = (2, 0, 1, 4)
VIEWS = {
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(1, 0),
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(3, 14),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "x[1:4]": lambda x: x[1:4],
    "x[:, ::2]": lambda x: x[:, ::2],
    "x[3]": lambda x: x[3],
    "x[-1, -1]": lambda x: x[-1, -1],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "unbind": lambda x: x.unbind()[2],
    "mT[1:]": lambda x: x.mT[1:],
    "mT.view": lambda x: x.view(-1).view(x.shape).mT,
    "mT.data": lambda x: x.mT.data,
    "mT.detach": lambda x: x.mT.detach(),
}
VIEW_WRITES = {
    "add_": lambda v: v.add_(1),
    "mul_": lambda v: v.mul_(v.clone()),
    "copy_": lambda v: v.copy_(torch.ones(v.shape)),
    "v[0] =": lambda v: v.__setitem__(0 if v.ndim else ..., 5.0),
    "v[mask] =": lambda v: v.__setitem__(v > 10, 0.0),
    "foreach": lambda v: torch._foreach_mul_([v], [v.clone()]),
    "out": lambda v: torch.mul(v.clone(), 3, out=v),
    "index_fill_": lambda v: v.index_fill_(0, torch.tensor([0]), 9.0),
    "sub_ of a sum": lambda v: v.sub_(v.sum()),
}


def written_view(x, view, write):
    seen = VIEWS[view](x)
    VIEW_WRITES[write](seen)
    return [seen.clone(), x.clone()]


@pytest.mark.parametrize("view", VIEWS)
@on_ranks(4, simulated=True)
def test_a_write_to_a_view_goes_into_its_base(view):
    matrix, grid = device_mesh((4,), ("dp",)), device_mesh((2, 2), ("dp", "tp"))
    ragged = [RaggedShard((0,), UNITS), RaggedShard((0, 1), UNITS), Shard(0), Partial()]
    places = [(matrix, [one]) for one in ragged]
    places += [(grid, [Shard(0), Shard(0)]), (grid, [Partial(), Shard(1)])]
    for write in VIEW_WRITES:
        wanted = written_view(MATRIX.clone(), view, write)
        for mesh, placements in places:
            x = distribute_tensor(MATRIX.clone(), mesh, placements)
            for ours, dense in zip(written_view(x, view, write), wanted, strict=True):
                assert torch.equal(ours.full_tensor(), dense), (view, write, placements)
            assert list(x.placements) == placements


@on_ranks(4, simulated=True)
def test_what_would_not_be_seen_elsewhere_is_refused():
    x = distribute_tensor(MATRIX.clone(), device_mesh((4,), ("dp",)), [RaggedShard((0, 1), UNITS)])
    first, second = x.mT, x.mT
    for write in (lambda: first.add_(1), lambda: first.data.add_(1), lambda: x.add_(1)):
        with pytest.raises(UnsupportedError, match="forced a copy"):
            write()
    del second
    first.data.add_(1)
    assert torch.equal(x.full_tensor(), MATRIX + 1)
    with pytest.raises((UnsupportedError, RuntimeError)):
        x.mT.expand(2, 6, 7).add_(1)
    x.requires_grad_()
    with pytest.raises((UnsupportedError, RuntimeError)):
        x.mT.add_(1)
    assert torch.equal(x.full_tensor(), MATRIX + 1)


def converted(mesh):
    for placements in ([vd.Replicate()], [RaggedShard((0, 1), UNITS)], [Shard(0)]):
        x = distribute_tensor(MATRIX.clone(), mesh, placements)
        for _ in range(2):
            for wide in (x.mT.to(torch.float64), x.mT.to(torch.float32, copy=True)):
                wide.mul_(2)
                assert torch.equal(wide.full_tensor(), MATRIX.mT.to(wide.dtype) * 2)
        x.mT.to(torch.float32).mul_(2)
        assert torch.equal(x.full_tensor(), MATRIX * 2)


def test_a_view_in_another_dtype_is_no_view():
    on_mesh((4,), converted, ("dp",))


@on_ranks(4, simulated=True)
def test_a_part_assigned_to_where_it_is_from():
    mesh = device_mesh((4,), ("dp",))
    for placements in ([RaggedShard((0, 1), UNITS)], [Shard(0)]):
        x = distribute_tensor(MATRIX.clone(), mesh, placements)
        x[-2:] *= 2
        assert torch.equal(x.full_tensor()[-2:], MATRIX[-2:] * 2)
        bits, before = x.view(torch.int32), x.full_tensor()
        with pytest.raises(UnsupportedError, match="forced a copy"):
            x[:] = bits  # converts
        assert torch.equal(x.full_tensor(), before)


ONES = torch.ones(3, 4)
PLACES = torch.tensor([0, 1])
ROW = torch.zeros(1, 4, dtype=torch.int64)
OVERLAPPING = {
    "fill_": lambda x: x.fill_(1.0),
    "fill_ by a tensor": lambda x: x.fill_(torch.tensor(1.0)),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(ONES),
    "relu_": torch.relu_,
    "+=": lambda x: x.__iadd__(1),
    "normal_": lambda x: x.normal_(),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "x[0] =": lambda x: x.__setitem__(0, 7.0),
    "x[0] = a tensor": lambda x: x.__setitem__(0, torch.tensor(7.0)),
    "x[1:] =": lambda x: x.__setitem__(slice(1, None), 7.0),
    "x[:, 0] =": lambda x: x.__setitem__((slice(None), 0), 7.0),
    "x[mask] =": lambda x: x.__setitem__(ONES > 0, 7.0),
    "masked_fill_": lambda x: x.masked_fill_(ONES > 0, 1.0),
    "masked_scatter_": lambda x: x.masked_scatter_(ONES > 0, torch.ones(12)),
    "index_add_": lambda x: x.index_add_(0, PLACES, ONES[:2]),
    "index_copy_": lambda x: x.index_copy_(0, PLACES, ONES[:2]),
    "scatter_": lambda x: x.scatter_(0, ROW, 1.0),
    "put_": lambda x: x.put_(PLACES, torch.ones(2)),
    "cumsum_": lambda x: x.cumsum_(0),
    "addmm_": lambda x: x.addmm_(torch.ones(3, 2), torch.ones(2, 4)),
    "foreach": lambda x: torch._foreach_mul_([x], [ONES]),
    "foreach zero": lambda x: torch._foreach_zero_([x]),
    "dropout": lambda x: F.dropout(x, 0.5, True, True),
    "init": nn.init.trunc_normal_,
    "out": lambda x: torch.mul(ONES, 2, out=x),
}
# Torch warns that it will refuse these; they are refused here.
REFUSED = {
    "index_fill_": lambda x: x.index_fill_(0, PLACES, 1.0),
    "index_put_": lambda x: x.index_put_((PLACES,), torch.tensor(1.0)),
    "x[places] =": lambda x: x.__setitem__(PLACES, 7.0),
    "tril_": lambda x: x.tril_(),
}
SHARED = "unsupported operation: more than one element of the written-to tensor"


def refused(write, x):
    torch.manual_seed(0)
    try:
        write(x)
    except RuntimeError as error:
        return str(error).partition(" refers to")[0]
    return None


@pytest.mark.filterwarnings("ignore:Use of")
@on_ranks(4, simulated=True)
def test_expanded_tensors_are_written_as_on_one_device(rank, world_size):
    mesh = device_mesh((world_size,))
    column = torch.arange(3.0).reshape(3, 1)
    # Of three rows over four ranks, the last holds none.
    for placement in (Replicate(), Shard(0), Partial()):
        for name, write in OVERLAPPING.items():
            whole = column.clone().expand(3, 4)
            y = distribute_tensor(column, mesh, [placement], src_data_rank=None).expand(3, 4)
            assert refused(write, y) == refused(write, whole), name
            assert torch.equal(y.full_tensor(), whole), name
        for name, write in REFUSED.items():
            y = distribute_tensor(column, mesh, [placement], src_data_rank=None).expand(3, 4)
            assert refused(write, y) == SHARED, name
