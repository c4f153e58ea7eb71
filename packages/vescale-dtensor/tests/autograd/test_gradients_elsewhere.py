"""`.grad` tells of contributions that a layer above keeps, and whoever sets it drops them."""

from typing import Any

import torch
import vescale_dtensor as vd
from torch import Tensor, nn
from vescale_comm.testing import on_ranks
from vescale_dtensor import storage

SHARES = (1, 2)


class Keeper:
    """Keeps the contribution of one rank to a parameter of three elements."""

    def __init__(self, parameter: nn.Parameter, rank: int) -> None:
        self.parameter, self.rank = parameter, rank
        self.kept: Tensor | None = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
        storage.keep_gradient(parameter, self.kept, self)

    def add(self, shard: Tensor) -> None:
        assert self.kept is not None
        self.kept[sum(SHARES[: self.rank]) :][: SHARES[self.rank]] += shard

    def drop(self) -> None:
        storage.release_kept_gradient(self.parameter)
        self.kept = None


def made(rank: int) -> tuple[nn.Parameter, Keeper]:
    mesh = vd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    whole = torch.tensor([4.0, 5.0, 6.0])
    parameter = nn.Parameter(vd.distribute_tensor(whole, mesh, [vd.RaggedShard((0,), SHARES)]))
    return parameter, Keeper(parameter, rank)


def gradient(parameter: nn.Parameter) -> list[float]:
    found: Any = parameter.grad
    assert isinstance(found, vd.DTensor)
    return found.full_tensor().tolist()


@on_ranks(2, simulated=True)
def test_kept_gradients_are_found(rank: int, world_size: int):
    parameter, keeper = made(rank)
    assert parameter.grad is parameter.grad
    assert parameter.grad.placements == (vd.Partial("sum"),)
    assert gradient(parameter) == [3.0, 6.0, 9.0]
    # What `.grad` holds itself becomes part of it.
    (parameter * 10).sum().backward()
    assert gradient(parameter) == [13.0, 16.0, 19.0]
    assert parameter.grad.placements == (vd.Partial("sum"),)
    parameter.grad.mul_(2)
    parameter.grad = parameter.grad
    assert gradient(parameter) == [26.0, 32.0, 38.0]
    parameter.grad = parameter.grad / 2
    assert keeper.kept is None
    assert gradient(parameter) == [13.0, 16.0, 19.0]

    parameter, keeper = made(rank)
    torch.optim.SGD([parameter]).zero_grad()
    assert keeper.kept is None
    assert parameter.grad is None

    parameter, keeper = made(rank)
    torch.optim.SGD([parameter]).zero_grad(set_to_none=False)
    assert keeper.kept is not None
    assert keeper.kept.tolist() == [0.0] * 3


@on_ranks(2, simulated=True)
def test_gradients_are_kept_beside_one_that_was_read(rank: int, world_size: int):
    mesh = vd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    whole = torch.tensor([4.0, 5.0, 6.0])
    for released in (False, True):
        parameter = nn.Parameter(vd.distribute_tensor(whole, mesh, [vd.RaggedShard((0,), SHARES)]))
        (parameter * 10).sum().backward()
        before = parameter.grad
        Keeper(parameter, rank)
        if released:
            storage.release_kept_gradient(parameter)
            assert parameter.grad is before
            assert gradient(parameter) == [10.0, 10.0, 10.0]
        else:
            assert gradient(parameter) == [13.0, 16.0, 19.0]
