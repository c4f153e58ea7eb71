"""A captured function that writes to a part of a parameter, without grad, does so in replays."""

import torch
import vescale_dtensor as vd
from vescale_comm.testing import on_ranks
from vescale_dtensor import Replicate, Shard


@on_ranks(2, simulated=True)
def test_replays_write_as_well(rank, world_size):
    mesh = vd.init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    losses = {}
    for wrap in (lambda function: function, vd.capture):
        weight = vd.distribute_tensor(torch.linspace(-1, 1, 12).view(3, 4), mesh, [Replicate()])
        weight.requires_grad_()

        def loss(x, weight=weight):
            with torch.no_grad():
                weight[0].mul_(0.5)
                weight[1:, 2] = 0.25
            return (x @ weight.t()).square().sum()

        function = wrap(loss)
        found = losses[wrap] = []
        for step in range(4):
            x = torch.linspace(0, 1 + step, 20).view(5, 4)
            one = function(vd.distribute_tensor(x, mesh, [Shard(0)]))
            one.backward()
            found += [one.full_tensor().detach(), weight.grad.full_tensor()]
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=0.01)
            weight.grad = None
    assert function._misses.replays > 0
    eager, captured = losses.values()
    assert all(map(torch.equal, eager, captured))
