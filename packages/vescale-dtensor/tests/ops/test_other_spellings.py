"""What torch takes under another spelling it takes here, and what it refuses is its own error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor

OF_FLOATS = {
    "a type's name": lambda x: x.type("torch.DoubleTensor"),
    "a type": lambda x: x.type(torch.DoubleTensor),
    "a dtype": lambda x: x.type(dtype=torch.float64, non_blocking=True),
    "the default type": lambda x: x.type(torch.Tensor),
    "the same type": lambda x: x.type("torch.FloatTensor") is x,
    "no type": lambda x: x.type("torch.Foo"),
    "copy.copy": lambda x: (copy.copy(x).add_(1), x),
    "movedim of a scalar": lambda x: x.sum().movedim(0, 0),
    "moveaxis of a scalar": lambda x: x.sum().moveaxis((), ()),
    "movedim beyond a scalar": lambda x: x.sum().movedim(1, 0),
    "movedim beyond": lambda x: x.movedim(0, 5),
    "movedim twice": lambda x: x.movedim((0, 0), (0, 1)),
    "movedim of more": lambda x: x.movedim((0, 1), (0,)),
    "movedim by name": lambda x: x.movedim(source=(0, 1), destination=(-1, 0)),
    "mT of a scalar": lambda x: x.sum().mT,
    "mH of a scalar": lambda x: x.sum().mH,
    "adjoint of a scalar": lambda x: x.sum().adjoint(),
    "t of a scalar": lambda x: x.sum().t(),
    "mT of a row": lambda x: x[0].mT,
    "view with gaps": lambda x: x[:, 1:].view(-1),
    "view of a dtype": lambda x: x.view(torch.int16),
    "view of a dtype with gaps": lambda x: x[:, ::2].view(torch.int16),
    "view of a dtype as large": lambda x: x[:, ::2].view(torch.int32),
    "unfold, picked": lambda x: (y := x.unfold(1, 2, 1)[[0, 0, 0]], y.stride()),
    "unbind, written": lambda x: (x.unbind(0)[0].mul_(2), x),
}
OF_LEAVES = {
    "unbind": lambda x: (x * 1).unbind(0)[0].mul_(2),
    "split": lambda x: (x * 1).split(2)[0].mul_(2),
    "chunk": lambda x: (x * 1).chunk(2, 1)[0].mul_(2),
    "unsafe_chunk": lambda x: (x * 1).unsafe_chunk(2, 1)[0].mul_(2),
    "select": lambda x: (x * 1).select(0, 1).mul_(2),
    "copy.copy of a leaf": lambda x: (copy.copy(x).requires_grad, copy.copy(x).is_leaf),
    "copy.copy of a parameter": lambda x: isinstance(copy.copy(nn.Parameter(x)), nn.Parameter),
}
INITIALISED = {
    "FAN_IN": lambda x: nn.init.kaiming_uniform_(x, mode="FAN_IN"),
    "Fan_Out": lambda x: nn.init.kaiming_uniform_(x, 0, "Fan_Out"),
    "normal FAN_OUT": lambda x: nn.init.kaiming_normal_(x, mode="FAN_OUT"),
    "no mode": lambda x: nn.init.kaiming_uniform_(x, mode="fan"),
    "std by name": lambda x: nn.init.normal_(x, 0.0, std=0.02),
    "b by name": lambda x: nn.init.uniform_(x, -1.0, b=5.0),
    "val by name": lambda x: nn.init.constant_(x, val=3.0),
    "a tensor by name": lambda x: nn.init.normal_(tensor=x, mean=2.0),
}


def assigned(name, value):
    def write(x):
        setattr(x, name, value(x))
        return x

    return write


OF_COMPLEX = {
    "real": assigned("real", lambda x: torch.ones(x.shape)),
    "real of imag": assigned("real", lambda x: x.imag.clone()),
    "imag": assigned("imag", lambda x: torch.ones(x.shape)),
    "imag of a number": assigned("imag", lambda x: 2.0),
}


def whole(value):
    if isinstance(value, DTensor):
        return value.detach().full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [whole(each) for each in value] if isinstance(value, tuple) else value


def outcome(call, x):
    torch.manual_seed(1)
    try:
        return whole(call(x))
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error).__name__


GROUPS = [
    (OF_FLOATS, torch.float32, False),
    (OF_LEAVES, torch.float32, True),
    (INITIALISED, torch.float32, False),
    (OF_COMPLEX, torch.complex64, False),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("calls", "dtype", "leaf"), GROUPS, ids=["floats", "leaves", "initialised", "complex"]
)
@on_ranks(2, simulated=True)
def test_as_on_one_device(rank, world_size, calls, dtype, leaf):
    mesh = device_mesh((world_size,))
    given = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=dtype)
    for name, call in calls.items():
        wanted = outcome(call, given.clone().requires_grad_(leaf))
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = given.clone().requires_grad_(leaf)
            y = distribute_tensor(x, mesh, [placement], src_data_rank=None)
            found = outcome(call, y)
            if isinstance(wanted, str):
                assert found == wanted, name
            else:
                torch.testing.assert_close(found, wanted, msg=f"{name}: {found}, not {wanted}")
