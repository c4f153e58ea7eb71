"""A write to a tensor with expanded dims is refused on every rank where one device refuses it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor

ONES = torch.ones(3, 4)
PLACES = torch.tensor([0, 1])
ROW = torch.zeros(1, 4, dtype=torch.int64)
WRITES = {
    "fill_": lambda x: x.fill_(1.0),
    "fill_ by a tensor": lambda x: x.fill_(torch.tensor(1.0)),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(ONES),
    "relu_": torch.relu_,
    "+=": lambda x: x.__iadd__(1),
    "normal_": lambda x: x.normal_(),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "x[0] =": lambda x: x.__setitem__(0, 7.0),
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
        for name, write in WRITES.items():
            whole = column.clone().expand(3, 4)
            y = distribute_tensor(column, mesh, [placement], src_data_rank=None).expand(3, 4)
            assert refused(write, y) == refused(write, whole), name
            assert torch.equal(y.full_tensor(), whole), name
        for name, write in REFUSED.items():
            y = distribute_tensor(column, mesh, [placement], src_data_rank=None).expand(3, 4)
            assert refused(write, y) == SHARED, name
