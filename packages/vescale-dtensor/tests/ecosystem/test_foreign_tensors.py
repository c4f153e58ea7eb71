"""A tensor class of another library that keeps DTensors inside computes with them, by itself.

As one device does, whichever operand comes first, and also where DTensors are watched.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import Tensor
from vescale_comm import simulate
from vescale_dtensor import Replicate, Shard


class Scaled(Tensor):
    """A weight in eight bits with a scale, as libraries of quantisation write them."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Scaled:
        options = {"dtype": scale.dtype, "device": whole.device}
        return Tensor._make_wrapper_subclass(cls, whole.shape, **options)

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *bias = args
            product = torch.mm(x, weight.whole.t().to(x.dtype)) * weight.scale.flatten()
            return product + bias[0] if bias else product
        if func is Tensor.addcmul:
            first, second, weight = args
            return first + second * (weight.whole * weight.scale)
        if func is torch.rsub:
            return args[1] - args[0].whole * args[0].scale
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    whole = torch.randint(-8, 8, (6, 5), generator=source, dtype=torch.int8)
    scale, bias = torch.rand(6, 1, generator=source), torch.rand(6, generator=source)
    return torch.rand(7, 5, generator=source), whole, scale, bias


def distributed(world_size: int, rows: object, weight: object) -> tuple[Tensor, Scaled, Tensor]:
    mesh = vd.init_device_mesh("cpu", (world_size,))
    x, whole, scale, bias = operands()
    parts = [vd.distribute_tensor(one, mesh, [weight]) for one in (whole, scale, bias)]
    return vd.distribute_tensor(x, mesh, [rows]), Scaled(*parts[:2]), parts[2]


@pytest.mark.parametrize("rows", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("weight", [Shard(0), Replicate()], ids=str)
def test_what_holds_dtensors_is_asked_itself(rows, weight):
    x, whole, scale, bias = operands()
    expected = F.linear(x, whole * scale, bias)

    def on_a_rank(rank: int, world_size: int) -> None:
        ours, quantised, added = distributed(world_size, rows, weight)
        for _ in range(3):  # known calls, too
            torch.testing.assert_close(F.linear(ours, quantised, added).full_tensor(), expected)
        torch.testing.assert_close(F.linear(x, quantised, bias).full_tensor(), expected)
        other = vd.distribute_tensor(whole.float(), added.device_mesh, [rows])
        first = torch.rsub(quantised, other)
        torch.testing.assert_close(first.full_tensor(), whole - whole * scale)
        last = other.addcmul(other, quantised)
        torch.testing.assert_close(last.full_tensor(), whole + whole * (whole * scale))
        with vd.explain() as report:
            watched = F.linear(ours, quantised, added)
        torch.testing.assert_close(watched.full_tensor(), expected)
        assert report.records

    simulate(4).run(on_a_rank)


def test_what_its_class_does_not_know_is_an_error_on_every_rank():
    def on_a_rank(rank: int, world_size: int) -> str:
        ours, quantised, _ = distributed(world_size, Shard(0), Shard(0))
        with pytest.raises((NotImplementedError, vd.UnsupportedError)) as caught:
            torch.mm(ours, quantised)
        return type(caught.value).__name__

    assert len({*simulate(4).run(on_a_rank)}) == 1
