"""A graph of which activations wait on the host has the bits of the given one, and takes what was
asked, on paper and by the allocator; copies have a line of their own in the timeline.

Random functions with views, writes and draws; a model's step with dropout; steps of a parallelised
model. And torch's own `save_on_cpu` around eager steps.

A plan of memory waits for copies to the host before it writes where they read.

The copies here are as late as on a GPU they may be: nothing is copied before somebody waits.

A graph that computes activations twice has the bits of the given one, and takes what was asked.

Random functions with views, writes and draws; a decoder's step with dropout, where half of what
lives between forward and backward goes; a parallelised model's joint graph on several ranks.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
from graph_steps import Net, bits, model_step, random_step
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_comm import simulate
from vescale_dtensor import capture, joint
from vescale_parallel import Plan, graph, memory, mesh, parallelize
from vescale_parallel._graph import host_ops

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


Copy = Callable[[], object]


@pytest.fixture
def late() -> Iterator[list[Copy]]:
    """What has been started and not been done; kernels of the CPU come before those of all."""
    host_ops.operators()
    started: list[Copy] = []
    library = torch.library.Library(host_ops.NAMESPACE, "IMPL")

    def write(x: Tensor, memory: Tensor, offset: int) -> Tensor:
        # Of the memory and not of the value, which it keeps, as the allocator would.
        started.append(lambda: host_ops._write(x, memory, offset))
        return x.new_empty(0)

    def read(token: Tensor, memory: Tensor, offset: int, *like: Any) -> Tensor:
        size, stride, dtype = like
        found = torch.empty_strided(size, stride, dtype=dtype).fill_(torch.nan)
        started.append(lambda: found.copy_(host_ops._place(memory, offset, size, stride, dtype)))
        return found

    def ready(x: Tensor) -> Tensor:
        while started:
            started.pop(0)()
        return x

    for name, call in (("host_write", write), ("host_read", read), ("host_ready", ready)):
        library.impl(name, call, "CPU")
    yield started
    library._destroy()


def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Activations that are used again behind a peak, with memory that is used anew on the way."""
    kept = [torch.tanh(x @ w * k) for k in range(1, 4)]
    y = kept[0] + kept[1] + kept[2]
    for _ in range(3):
        wide = y.repeat(1, 4).exp()
        y = (wide @ wide.mT).softmax(1)
    for one in reversed(kept):
        y = (y * one) @ w
    return y.sum(), y


def test_what_is_copied_is_not_written_over(late: list[Copy]):
    x, w = torch.randn(64, 64), torch.randn(64, 64) / 8
    made = make_fx(function, tracing_mode="fake")(x, w)
    with pytest.raises(graph.GraphError, match="which is the least that") as told:
        graph.offload(made, 1)
    least = int(str(told.value).split("as it is, and ")[1].split()[0].replace(",", ""))
    found = graph.offload(made, least)
    assert len(found.moved) == 3
    planned = memory.plan(found.graph_module, solver="rules", seconds=0)
    assert 0 < sum(step.waits for step in planned._arena.steps) < 3
    expected = function(x, w)
    for _ in range(2):
        got = planned.run(x, w)
        assert not late
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


def test_it_waits_where_it_has_to_only(late: list[Copy]):
    x, w = torch.randn(64, 64), torch.randn(64, 64) / 8
    made = make_fx(function, tracing_mode="fake")(x, w)
    planned = memory.plan(made, solver="rules", seconds=0)
    assert not any(step.waits for step in planned._arena.steps)


def least_recomputed(made: Any) -> int:
    """The least_recomputed that recomputing can reach, as its refusal tells."""
    with pytest.raises(graph.GraphError, match="with all computed again that can be") as told:
        graph.recompute(made, 1)
    return int(str(told.value).split(", and ")[1].split()[0].replace(",", ""))


@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_that_compute_twice_keep_their_bits(seed: int):
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    made = make_fx(random_step(seed), tracing_mode="fake")(x, y)
    whole = memory.plan(made, solver="rules", seconds=0).program_peak
    assert graph.recompute(made, whole).nodes == ()
    bound = least_recomputed(made)
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


def trained_again(rank: int, world_size: int) -> tuple[int, int, int]:
    plan = Plan(
        batch="dp:0", parameters={"*.up.*": "tp:0", "*.down.weight": "tp:1", "*": "replicate"}
    )
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(parallelize(Net(), mesh(dp=2, tp=2, device_type="cpu"), plan))
    x, y = torch.randn(64, 16), torch.randint(4, (64,))
    whole = joint(capture(models[0]), x, y)
    bound = least_recomputed(whole.graph_module)
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


def test_steps_of_a_mesh_that_compute_twice():
    for before, peak, nodes in simulate(4).run(trained_again):
        assert peak < 0.8 * before
        assert nodes > 0
