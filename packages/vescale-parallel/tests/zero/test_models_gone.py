"""Whether Python has freed a model that nobody can reach changes nothing of what a step sends."""

import gc
import weakref

import pytest
import torch
from torch import nn
from vescale_comm import simulate, trace
from vescale_dtensor import init_device_mesh
from vescale_parallel import Plan, Zero, parallelize
from vescale_parallel._zero.schedule import zero_schedule_of


def stepped(rank: int, world_size: int, zero: int, collects: bool):
    """A step of parameters whose model is gone: what it sent, and the parameters."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "dp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize(model, mesh, Plan(batch="replica:0, dp:0", zero=Zero(zero, over="dp")))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    schedule = zero_schedule_of(model)
    with schedule.no_sync():
        model(torch.ones(4, 8)).sum().backward()
    alive = weakref.ref(schedule)
    del model, schedule
    if collects:
        gc.collect()
    with trace() as sent:
        optimizer.step()
    values = [one.full_tensor().detach() for one in parameters]
    del optimizer, parameters
    gc.collect()
    return sent.counts(), values, alive() is None


@pytest.mark.parametrize("zero", [1, 3])
def test_a_step_sends_the_same(zero: int):
    kept, freed = (simulate(4)(stepped, zero, collects)[0] for collects in (False, True))
    assert kept[0] == freed[0]
    assert kept[0]["reduce_scatter"] == 2
    torch.testing.assert_close(kept[1], freed[1], rtol=0, atol=0)
    # Nothing keeps it for ever.
    assert kept[2]
    assert freed[2]
