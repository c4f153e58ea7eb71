"""Without a plan every model trains as on one device, sharded as far as memory asks for."""

import copy

import pytest
import torch
from torch import nn
from vescale_comm import simulate
from vescale_parallel import Plan, Zero, mesh, parallelize
from zero_models import batch, make, require_same_gradients


class Normed(nn.Module):
    """A batch norm, whose statistics are those of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 3}], ids=str)
def test_no_plan_is_right(sizes: dict[str, int]):
    torch.manual_seed(0)
    plain = Normed()
    inputs = torch.randn(7, 3)

    def program(rank: int, world_size: int) -> tuple[float, list[torch.Tensor]]:
        model = parallelize(copy.deepcopy(plain), mesh(device_type="cpu", **sizes))
        loss = model(inputs)
        loss.backward()
        return loss.item(), [one.grad.full_tensor() for one in model.parameters()]

    loss, gradients = simulate(torch.Size(sizes.values()).numel()).run(program)[0]
    expected = plain(inputs)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for found, one in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(found, one.grad, rtol=1e-5, atol=1e-6)


def test_the_plan_of_a_memory_that_asks_for_zero_trains_alike():
    plain = make()

    def program(rank: int, world_size: int) -> None:
        where = mesh(dp=2, tp=2, device_type="cpu")
        plan = Plan.data_parallel(plain, where, memory=1.0)
        assert plan.zero == Zero(3)
        model = parallelize(make(), where, plan)
        torch.manual_seed(5)  # dropout draws the same
        model(*batch(0)).backward()
        mine = copy.deepcopy(plain)
        torch.manual_seed(5)
        mine(*batch(0)).backward()
        require_same_gradients(model, mine)

    simulate(4).run(program)


def test_memory_decides_the_level():
    with torch.device("meta"):
        model = nn.Linear(1000, 1000, bias=False)
    levels = [
        Plan.data_parallel(model, {"dp": 4}, memory=share * 1e6 / 0.6).zero.level
        for share in (16.01, 15.99, 10.01, 9.99, 7.01, 6.99, 1.0)
    ]
    # 4 bytes of values, 4 of gradients and 8 of states an element, a quarter of what is sharded.
    assert levels == [0, 1, 1, 2, 2, 3, 3]
    assert Plan.data_parallel(model, {"dp": 4}).zero == Zero(0)
    assert Plan.data_parallel(model, {"dp": 1}, memory=1.0).zero == Zero(0)


def test_all_axes_share_the_batch():
    plan = Plan.data_parallel(nn.Linear(2, 2), {"replica": 2, "rows": 4}, zero=1, prefetch=2)
    assert plan.batch == "replica:0, rows:0"
    assert plan.zero == Zero(1, over="rows", prefetch=2)
    # Also of a class that does not name it: else nothing would be sharded.
    sizes = {"replica": 2, "rows": 4}
    plan = Plan.data_parallel(nn.Linear(2, 2), sizes, zero=Zero(3, prefetch=2))
    assert plan.zero == Zero(3, over="rows", prefetch=2)
    plan = Plan.data_parallel(nn.Linear(2, 2), sizes, zero=Zero(3, over="replica"))
    assert plan.zero == Zero(3, over="replica")
