"""A graph that computes activations twice has the bits of the given one, and takes what was asked.

Random functions with views, writes and draws; a decoder's step with dropout, where half of what
lives between forward and backward goes; a parallelised model's joint graph on several ranks.
"""

from typing import Any

import pytest
import torch
from graph_steps import Net, bits, model_step, random_step
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_comm import simulate
from vescale_dtensor import capture, joint
from vescale_parallel import Plan, graph, memory, mesh, parallelize


def least(made: Any) -> int:
    """The least that recomputing can reach, as its refusal tells."""
    with pytest.raises(graph.GraphError, match="with all computed again that can be") as told:
        graph.recompute(made, 1)
    return int(str(told.value).split(", and ")[1].split()[0].replace(",", ""))


@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_keep_their_bits(seed: int):
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    made = make_fx(random_step(seed), tracing_mode="fake")(x, y)
    whole = memory.plan(made, solver="rules", seconds=0).program_peak
    assert graph.recompute(made, whole).nodes == ()
    bound = least(made)
    assert bound <= whole
    for wanted in {bound, (bound + whole) // 2}:
        found = graph.recompute(made, wanted)
        assert found.peak <= wanted
        assert all(map(torch.equal, bits(made, x, y), bits(found.graph_module, x, y)))
        planned = memory.plan(found.graph_module, solver="rules", seconds=0)
        assert planned.program_peak == found.peak


def test_half_of_a_models_activations_go():
    made, given = model_step()
    whole = graph.recompute(made, 10**9)
    assert (whole.nodes, whole.peak) == ((), whole.peak_before)
    half = graph.recompute(made, whole.peak // 2)
    assert half.peak <= whole.peak // 2
    assert half.nodes
    assert not any("bernoulli" in one or "rand" in one for one in half.nodes)
    expected, found = (
        (torch.manual_seed(1), one(*given), torch.get_rng_state())
        for one in (made, half.graph_module)
    )
    assert all(map(torch.equal, expected[1], found[1]))
    assert torch.equal(expected[2], found[2])
    counted = memory.measured(lambda: half.graph_module(*given)).peak
    assert counted == pytest.approx(half.peak, rel=0.02)


def trained(rank: int, world_size: int) -> tuple[int, int, int]:
    plan = Plan(
        batch="dp:0", parameters={"*.up.*": "tp:0", "*.down.weight": "tp:1", "*": "replicate"}
    )
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(parallelize(Net(), mesh(dp=2, tp=2, device_type="cpu"), plan))
    x, y = torch.randn(64, 16), torch.randint(4, (64,))
    whole = joint(capture(models[0]), x, y)
    bound = least(whole.graph_module)
    made = graph.recompute(whole.graph_module, bound)
    torch.manual_seed(1)
    loss = whole.running(made.graph_module)(x, y)
    torch.manual_seed(1)
    expected = models[1](x, y)
    expected.backward()
    assert torch.equal(loss.full_tensor(), expected.full_tensor())
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor())
    return made.peak_before, made.peak, len(made.nodes)


def test_steps_of_a_mesh():
    for before, peak, nodes in simulate(4).run(trained):
        assert peak < 0.8 * before
        assert nodes > 0
