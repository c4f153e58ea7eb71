"""What is computed of a partial sum, and of a table too large to be gathered, is one device's.

Small tensors are gathered first, so the cases of the fuzz see little of either.
"""

import torch
import vescale_dtensor as vd
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Shard

FUNCTIONS = {
    "div": lambda s: s / 3,
    "div, floor": lambda s: torch.div(s, 3, rounding_mode="floor"),
    "div, trunc": lambda s: s.div(3, rounding_mode="trunc"),
    "floor_divide": lambda s: s // 3,
    "remainder": lambda s: s % 3,
    "reciprocal": lambda s: 1 / s,
    "add a number": lambda s: s + 1,
    "add": lambda s: s + s.detach() * 2,
    "mul": lambda s: s * s,
    "mul by a number": lambda s: s * 3,
    "abs": lambda s: s.abs(),
    "neg": lambda s: -s,
    "relu": lambda s: s.relu(),
    "to int": lambda s: (s * 10).int(),
    "to bool": lambda s: (s > 0).to(torch.float32),
    "where": lambda s: torch.where(s > 0, s, -s),
    "clamp": lambda s: s.clamp(-0.5, 0.5),
    "sum": lambda s: s.sum(),
    "max": lambda s: s.amax(),
    "norm": lambda s: s.norm(),
    "matmul": lambda s: s @ s,
    "index_select": lambda s: s.index_select(0, torch.tensor([1, 7])),
}


@on_ranks(2, simulated=True)
def test_functions_of_partial_sums(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    values = torch.linspace(-3, 4, 48).view(6, 8) ** 3
    for name, function in FUNCTIONS.items():
        x = vd.distribute_tensor(values, mesh, [Shard(0)])
        total = x.sum(0)
        assert total.placements[0].is_partial()
        found, expected = function(total).full_tensor(), function(values.sum(0))
        torch.testing.assert_close(found, expected, msg=lambda said, name=name: f"{name}: {said}")


def assigned(x, index, value):
    """A copy in which something was assigned, which returns nothing by itself."""
    copy = x.clone()
    copy[index] = value
    return copy


WIDENED = {
    "assigned a number": lambda s: assigned(s, 1, 7) * 2,
    "assigned where it is large": lambda s: assigned(s, s > 1, 2.5),
    "assigned rows": lambda s: assigned(s, torch.tensor([0, 2]), -1 if s.dtype.is_signed else 3),
    "assigned to another dtype": lambda s: assigned(s.to(torch.int64), slice(0, 2), s[1:]),
    "masked": lambda s: s.masked_fill(s > 1, 1) * 2,
    "times a number": lambda s: s * 3,
    "times a float": lambda s: s * 2.0,
    "times another dtype": lambda s: s * torch.ones(3, dtype=torch.int64),
    "times a small dtype": lambda s: s * torch.ones(3, dtype=torch.int8),
    "times itself": lambda s: s * s,
    "halved": lambda s: s / 2,
    "negated": lambda s: s if s.dtype is torch.bool else -s,
    "or": lambda s: s + s,
    "plus another dtype": lambda s: s + s.to(torch.int32),
    "plus a number": lambda s: s + 1,
    "summed": lambda s: s.sum(),
    "summed as itself": lambda s: s.sum(dtype=s.dtype),
    "averaged": lambda s: s.mean(dtype=torch.float64),
    "counted": lambda s: s.count_nonzero(),
    "cast": lambda s: s.to(torch.int64),
    "float": lambda s: s.float(),
    "copied": lambda s: (s != s).float().copy_(s),
    "joined": lambda s: torch.cat([s, s.to(torch.int16)]),
    "stacked": lambda s: torch.stack([s, s]),
    "contracted": lambda s: torch.einsum("i->", s),
    "accumulated": lambda s: s.cumsum(0),
    "product": lambda s: s.prod(),
    "transformed": lambda s: torch.fft.fft(s).real,
    "differences": lambda s: s.diff(),
    "compared": lambda s: s == s.flip(0),
    "added to": lambda s: s.to(torch.float32).add_(s),
}


@on_ranks(2, simulated=True)
def test_integer_sums_wrap_before_they_are_widened(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    values = torch.tensor([[1, 0, 125], [0, 0, 90], [1, 1, 125], [1, 0, 60]])
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64):
        large = values * (2**24 if dtype is torch.int32 else 1)
        whole = large.to(dtype)
        x = vd.distribute_tensor(whole, mesh, [Shard(0)])
        for made in (lambda t: t.sum(0, dtype=t.dtype), lambda t: t[0] + t[3]):
            for name, function in WIDENED.items():
                expected = function(made(whole))
                found = function(made(x)).full_tensor()
                assert found.dtype is expected.dtype, (name, dtype)
                torch.testing.assert_close(
                    found, expected, msg=lambda said, name=name: f"{name}: {said}"
                )


TABLE = torch.arange(4096.0).view(1024, 4)
AT = torch.tensor([1023, 0, 511, 512, 7])
LOOKED_UP = {
    "index_select": lambda t, at: t.index_select(0, at),
    "rows": lambda t, at: t[at],
    "embedding": lambda t, at: torch.nn.functional.embedding(at, t),
    "gather": lambda t, at: t.gather(0, at.view(-1, 1).expand(5, 4)),
    "take_along_dim": lambda t, at: t.take_along_dim(at.view(-1, 1), 0),
    "take": lambda t, at: t.take(at),
}


@on_ranks(3, simulated=True)
def test_rows_of_a_large_table(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    for name, function in LOOKED_UP.items():
        x = vd.distribute_tensor(TABLE.clone(), mesh, [Shard(0)]).requires_grad_()
        whole = TABLE.clone().requires_grad_()
        found, expected = function(x, AT), function(whole, AT)
        assert torch.equal(found.full_tensor(), expected), name
        expected.sum().backward()
        found.sum().backward()
        assert torch.equal(x.grad.full_tensor(), whole.grad), name


@on_ranks(2, simulated=True)
def test_the_last_dims_of_one_with_the_first_of_the_other(rank, world_size):
    mesh = device_mesh((world_size,), ("tp",))
    x, y = torch.arange(192.0).view(3, 8, 8), torch.arange(128.0).view(8, 8, 2) + 1
    expected = torch.tensordot(x, y, 2)
    for left, right in ((1, 0), (2, 1), (0, 2), (1, 1)):
        a = vd.distribute_tensor(x, mesh, [Shard(left)])
        b = vd.distribute_tensor(y, mesh, [Shard(right)])
        assert torch.equal(torch.tensordot(a, b, 2).full_tensor(), expected), (left, right)
