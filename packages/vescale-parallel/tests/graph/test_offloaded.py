"""A graph of which activations wait on the host has the bits of the given one, and takes what was
asked, on paper and by the allocator; copies have a line of their own in the timeline.

Random functions with views, writes and draws; a model's step with dropout; steps of a parallelised
model. And torch's own `save_on_cpu` around eager steps.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from graph_steps import Net, bits, model_step, random_step
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_comm import simulate
from vescale_parallel import Plan, graph, memory, mesh, parallelize

SLOW_LINK = graph.Machine(
    flops=1e12,
    memory_bandwidth=1e11,
    link=graph.Link(latency=0.0, bandwidth=1e10),
    host=graph.Link(latency=0.0, bandwidth=1e9),
)


def least(made: Any, **how: Any) -> int:
    """The least that is reached, as the refusal tells."""
    with pytest.raises(graph.GraphError, match="on the host, which is the least that") as told:
        graph.offload(made, 1, **how)
    return int(str(told.value).split("as it is, and ")[1].split()[0].replace(",", ""))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_graphs_keep_their_bits(seed: int, again: bool):
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    made = make_fx(random_step(seed), tracing_mode="fake")(x, y)
    whole = memory.plan(made, solver="rules", seconds=0).program_peak
    kept = graph.offload(made, whole)
    assert (kept.moved, kept.host_bytes, kept.peak) == ((), 0, whole)
    how = {"recompute": again, "machine": SLOW_LINK}
    bound = least(made, **how)
    assert bound < whole
    for wanted in {bound, (bound + whole) // 2}:
        found = graph.offload(made, wanted, **how)
        assert found.peak <= wanted
        # Twice: the host's memory is that of the graph, and is written anew.
        for values in ((x, y), (y, x)):
            assert all(map(torch.equal, bits(made, *values), bits(found.graph_module, *values)))
        planned = memory.plan(found.graph_module, solver="rules", seconds=0)
        assert planned.program_peak == found.peak
        assert planned.peak <= found.peak
        assert all(map(torch.equal, bits(made, x, y), bits(planned.run, x, y)))


def test_what_is_executed_takes_what_was_planned():
    made, given = model_step()
    whole = graph.offload(made, 10**9).peak
    half = graph.offload(made, whole // 2)
    assert half.moved
    assert half.peak <= whole // 2
    torch.manual_seed(1)
    expected = [*made(*given), torch.get_rng_state()]
    torch.manual_seed(1)
    taken = memory.measured(lambda: half.graph_module(*given))
    assert all(map(torch.equal, expected, [*taken.result, torch.get_rng_state()]))
    # The copies are real; the host's memory was there before, and is told apart.
    assert abs(taken.peak - half.peak) <= 0.02 * half.peak
    assert half.host_bytes >= whole - half.peak
    assert f"{len(half.moved)} values wait on the host" in str(half)


def test_copies_have_a_line_of_their_own():
    made, _ = model_step()
    whole = graph.offload(made, 10**9).peak
    # A step that computes for much longer than its copies take: they are not waited for.
    slow = graph.Machine(flops=1e9, memory_bandwidth=1e8, link=SLOW_LINK.link, host=SLOW_LINK.host)
    hidden = graph.offload(made, whole * 6 // 10, machine=slow)
    line = graph.timeline(hidden.graph_module, machine=slow)
    assert line.copying == pytest.approx(hidden.copying)
    assert line.exposed < 0.2 * line.copying
    assert {one.kind for one in line.spans if one.line == "copies"} == {"to_host", "to_device"}
    assert '"copies"' in line.to_perfetto()
    assert ">copies<" in line.to_svg()
    # And where the link is slow, what can be computed again is.
    either = graph.offload(made, whole * 6 // 10, machine=SLOW_LINK, recompute=True)
    assert either.recomputed
    assert either.copying < hidden.copying
    assert "copies" not in graph.timeline(made, machine=slow).to_svg()


def test_of_what_waits_nothing_is_written_to_and_results_stay():
    def step(x: Tensor) -> list[Tensor]:
        written, returned, read = x * 2, x * 3, x * 4
        big = torch.cat([x, x, x, x]).exp()
        small = big.sum(0)
        del big
        written.add_(small)
        return [written.sum(), returned, (read.t() @ small.view(-1, 1)).view(-1)]

    x = torch.randn(16, 16)
    made = make_fx(step, tracing_mode="fake")(x)
    peak = memory.plan(made, solver="rules", seconds=0).program_peak
    found = graph.offload(made, peak - 1024)
    assert found.moved == ("mul_2",)
    assert all(map(torch.equal, made(x), found.graph_module(x)))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({"dp": 2}, {"zero": 3}), ({"dp": 1, "tp": 2}, {}), ({"dp": 2, "tp": 1}, {"zero": 2})],
)
def test_steps_of_a_mesh(sizes: dict[str, int], words: dict[str, Any]):
    def run(rank: int, world_size: int) -> tuple[bool, bool]:
        def trained(change: Callable[[Any], Any]) -> list[Tensor]:
            torch.manual_seed(0)
            plan = Plan(parameters={"*.up.*": "tp:0", "*.down.weight": "tp:1", "*": "replicate"})
            model: Any = parallelize(Net(), mesh(device_type="cpu", **sizes), plan.with_(**words))
            x, y = torch.randn(8, 16), torch.randint(4, (8,))
            step = graph.train_step(model, model, x, y)
            step = step.with_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
            step = step.running(change(step.graph_module))
            torch.manual_seed(5)
            losses = [step(x, y) for _ in range(2)]
            values = [one.to_local().detach() for one in model.parameters()]
            return [*(one.full_tensor() for one in losses), *values]

        def lessened(module: Any) -> Any:
            module = graph.schedule(module).graph_module
            whole = graph.offload(module, 2**40).peak
            made = graph.offload(module, whole - whole // 20, recompute=True)
            assert made.moved
            return made.graph_module

        expected = trained(lambda module: module)
        found = trained(lessened)
        return len(found) == len(expected), all(map(torch.equal, expected, found))

    assert simulate(prod(sizes.values()))(run) == [(True, True)] * prod(sizes.values())
