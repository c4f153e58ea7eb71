"""The hook that makes a total a contribution again stays from step to step, and is one.

That it never counts twice is held by the random programs of `test_kept_gradients`.
"""

import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Replicate, Shard, gradient_total


@on_ranks(2, simulated=True)
def test_it_is_registered_once(rank: int, world_size: int):
    mesh = device_mesh((world_size,), ("dp",))
    placed = vd.distribute_tensor(torch.ones(4, 3), mesh, [Replicate()], src_data_rank=None)
    weight = nn.Parameter(placed)
    x = vd.distribute_tensor(torch.ones(6, 3), mesh, [Shard(0)], src_data_rank=None)
    handles = set()
    for _ in range(4):
        F.linear(x, weight).square().sum().backward()
        gradient_total(weight)
        handles.add(id(weight._leaf_gradient.accumulation_hook[0]))
        weight.grad = None
    assert len(handles) == 1
    # Backwards without a total in between pay for one call.
    F.linear(x, weight).square().sum().backward()
    assert weight._leaf_gradient.accumulation_hook is not None
    F.linear(x, weight).square().sum().backward()
    assert weight._leaf_gradient.accumulation_hook is None
