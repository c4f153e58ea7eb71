"""Every draw of a joint graph stays, used or not, equal to another or not: it moves the stream."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
import vescale_rng
from torch import nn
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Shard, joint


def drawn(graph):
    return [node for node in graph.nodes if "filled" in str(node.target)]


def graph_and_eager(rank, world_size, policy):
    mesh = device_mesh((world_size,), ("dp",))
    weight = nn.Parameter(vd.distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]))
    noise = vd.zeros(5, 3, device_mesh=mesh, placements=[Shard(0)])

    def step():
        F.dropout(weight, 0.5)  # whose numbers nobody uses
        noise.normal_()  # written to a tensor from outside
        twice = F.dropout(weight, 0.5) + F.dropout(weight, 0.5)
        return (twice * noise * vd.rand(3, device_mesh=mesh)).sum()

    with vescale_rng.use(policy):
        whole = joint(vd.capture(step))
        module = whole.graph_module
        assert len(drawn(module.graph)) == 5
        module.graph.eliminate_dead_code()
        CSEPass()(module)
        assert len(drawn(module.graph)) == 5
        module.recompile()
        found = []
        for run_once in (step, whole):
            torch.manual_seed(7)
            weight.grad = None
            loss = run_once()
            if run_once is step:
                loss.backward()
            state = torch.get_rng_state()
            wholes = [one.full_tensor() for one in (loss, weight.grad, noise)]
            found.append([*wholes, state])
    assert all(map(torch.equal, *found))
    copied = copy.deepcopy(module)
    name = drawn(copied.graph)[0].args[1]
    del whole, module, run_once
    gc.collect()
    assert drawn(copied.graph)[0].meta["draw"].name == name  # a copy keeps its draws
    return True


@pytest.mark.parametrize("policy", ["native", "portable"])
def test_draws_stay(policy):
    assert all(simulate(2).run(graph_and_eager, policy))


def test_a_draw_without_its_graph_says_so():
    with pytest.raises(RuntimeError, match="keep the graph"):
        torch.ops.vescale_dtensor.filled(torch.empty(2), "draw_of_nobody")
