"""Every level of ZeRO with and without tensor parallelism: a step's graph has eager mode's bits.

As traced, with its communication scheduled, and, where ranks have other operators than each other
(tensor parallelism), with what lies between collectives handed to a compiler that keeps bits; over
steps of clipped AdamW with masks of dropout. Rows are uneven, and a rank may have none.
"""

import pytest
import torch
from graph_models import TENSOR, Net, batch
from torch import nn, optim
from vescale_comm import simulate
from vescale_parallel import Plan, graph, mesh, parallelize

STEPS = 2


def built(sizes, zero):
    torch.manual_seed(0)
    net = Net(1)
    net.blocks[0].norm.weight.requires_grad_(False)
    rules = TENSOR if "tp" in sizes else {"*": "replicate"}
    plan = Plan(axes=tuple(sizes), batch="dp:0", parameters=rules, zero=zero)
    model = parallelize(net, mesh(**sizes), plan)
    return model, optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.02)


def local(value):
    return getattr(value, "_local_tensor", value)


def compared(rank, world_size, sizes, zero, rows):
    (eager, first), (model, second) = built(sizes, zero), built(sizes, zero)
    step = graph.train_step(model, model, batch(0)[:rows]).with_optimizer(second, max_norm=0.3)
    planned = graph.schedule(step.graph_module).graph_module
    modules, regions = [step.graph_module, planned], ()
    if "tp" in sizes:  # alike on all ranks of dp: test_compiled.py has it
        compiled = graph.compile_regions(planned, backend="aot_eager")
        modules.append(compiled.graph_module)
        regions = compiled.regions
    for at in range(len(modules) * STEPS):
        words = batch(at)[:rows]
        torch.manual_seed(at)
        loss, norm = step.running(modules[at // STEPS])(words)
        state = torch.get_rng_state()
        torch.manual_seed(at)
        first.zero_grad()
        expected = eager(words)
        expected.backward()
        expected_norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.3)
        first.step()
        pairs = [(loss.full_tensor(), expected.full_tensor()), (torch.get_rng_state(), state)]
        pairs.append((norm.full_tensor(), expected_norm.full_tensor()))
        trained = zip(model.parameters(), eager.parameters(), strict=True)
        pairs += [(local(one), local(two)) for one, two in trained]
        same = [torch.equal(one, two) for one, two in pairs]
        assert all(same), (at, same)
    assert not any(one.why_not for one in regions if one.operations > 1)
    return [(one.name, one.alike) for one in regions]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=["dp4", "dp2.tp2"])
def test_steps_have_the_bits_of_eager_mode(sizes, zero):
    found = simulate(4).run(compared, sizes, zero, 3)
    # Each names the regions of its own graph, and which of them are everybody's.
    common = [{name for name, alike in one if alike} for one in found]
    assert common[0] == common[1] == common[2] == common[3]
    if "tp" in sizes:
        assert common[0]
        assert len(found[0]) > len(common[0])
