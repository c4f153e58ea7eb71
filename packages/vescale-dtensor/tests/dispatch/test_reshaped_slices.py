"""A reshaped part of a tensor shares memory where one device shares it, on every rank, or says so.

One device may view the part or copy it, by its global strides: gaps and expanded dims included.
Where it copies, either side is written to and the other stays. Where it views, the write is seen on
both sides, or it is refused on every rank.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Shard

SHAPE = (4, 3, 6)

PARTS = {
    "all": lambda x: x,
    "columns": lambda x: x[..., :5],
    "later columns": lambda x: x[:, :, 2:],
    "rows": lambda x: x[1:],
    "one row": lambda x: x[:1],
    "middle": lambda x: x[:, 1:],
    "steps": lambda x: x[::2],
    "steps within": lambda x: x[:, :, ::2],
    "number": lambda x: x[:, 1],
    "last number": lambda x: x[..., 2],
    "expanded": lambda x: x[:, :1].expand(4, 2, 6),
    "repeated": lambda x: x[:, :, None].expand(4, 3, 2, 6),
    "broadcast": lambda x: x[:1].broadcast_to(4, 3, 6),
    "transposed": lambda x: x.transpose(0, 2),
    "part of transposed": lambda x: x.transpose(0, 1)[:, 1:],
    "columns of transposed": lambda x: x.mT[..., 1:],
    "transposed columns": lambda x: x[..., :4].mT,
    "narrow": lambda x: x.narrow(0, 1, 2),
    "split": lambda x: x.split(2, 2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "unfold": lambda x: x.unfold(2, 2, 2),
}
RESHAPES = {
    "flatten": lambda v: v.flatten(),
    "flatten first": lambda v: v.flatten(0, 1),
    "flatten last": lambda v: v.flatten(-2),
    "ravel": lambda v: v.ravel(),
    "reshape two": lambda v: v.reshape(2, -1),
    "reshape first": lambda v: v.reshape(-1, v.shape[-1]),
    "reshape same": lambda v: v.reshape(v.shape),
    "reshape_as": lambda v: v.reshape_as(torch.empty(v.numel())),
    "contiguous": lambda v: v.contiguous(),
    "view": lambda v: v.view(-1),
    "view first": lambda v: v.view(-1, v.shape[-1]),
    "unflatten": lambda v: v.unflatten(-1, (1, -1)),
    "torch.flatten": lambda v: torch.flatten(v, start_dim=0),
    "torch.reshape": lambda v: torch.reshape(v, (1, -1)),
    "twice": lambda v: v.reshape(-1, v.shape[-1]).reshape(-1),
}
WRITES = {
    "relu_": lambda base, made: torch.relu_(made),
    "add_ to it": lambda base, made: made.add_(1),
    "item": lambda base, made: made.__setitem__(0, 7.0),
    "add_ to base": lambda base, made: base.add_(1),
    "item of base": lambda base, made: base.__setitem__((slice(None), 1), 7.0),
    "out": lambda base, made: torch.mul(made.clone(), 3, out=made),
}
DONE, REFUSED, UNSUPPORTED = "done", "refused by torch", "unsupported"


def outcome(base, part, reshape, write):
    """Whether the write was done; what the base holds then; and what the result does."""
    made = None
    try:
        made = RESHAPES[reshape](PARTS[part](base))
        WRITES[write](base, made)
    except vd.UnsupportedError:
        return UNSUPPORTED, base, None
    except (RuntimeError, IndexError):
        return REFUSED, base, None
    return DONE, base, made


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, vd.DTensor) else tensor


def layouts(size):
    yield [vd.Replicate()]
    if size > 1:
        yield from ([Shard(0)], [Shard(1)], [Shard(2)])
        yield [vd.RaggedShard((0,), (1, 3, 0)[:size])]


def shares(part, reshape):
    x = torch.zeros(SHAPE)
    try:
        return RESHAPES[reshape](PARTS[part](x)).untyped_storage().data_ptr() == x.data_ptr()
    except RuntimeError:
        return False


def run_part(rank, size, part, reshapes):
    mesh = device_mesh((size,), ("dp",))
    found = []
    for reshape, write, placements in product(reshapes, WRITES, layouts(size)):
        x = torch.arange(72.0).reshape(SHAPE) - 20
        y = vd.distribute_tensor(x.clone(), mesh, placements, src_data_rank=None)
        before = x.clone()
        wanted, base, result = outcome(x, part, reshape, write)
        done, ours, made = outcome(y, part, reshape, write)
        case = reshape, write, placements, done, wanted
        found.append(case)
        if done == UNSUPPORTED and (wanted == REFUSED or (size > 1 and shares(part, reshape))):
            # A view for which something has to be sent: a write is refused, and changes nothing.
            assert torch.equal(whole(ours), before), case
            continue
        assert done == wanted, case
        assert torch.equal(whole(ours), base), case
        assert result is None or torch.equal(whole(made), result), case
    return found


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_as_on_one_device(part, size):
    found = simulate(size)(run_part, part, RESHAPES)
    assert all(each == found[0] for each in found)  # what one rank refuses, all do


def test_some_as_on_one_device():
    for part in ("columns", "repeated", "steps within"):
        found = simulate(3)(run_part, part, ("flatten", "reshape first"))
        assert all(each == found[0] for each in found)
