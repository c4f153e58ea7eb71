"""Liveness of a graph is that of its run: aliases, writes in place, draws and collectives."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_parallel import ParallelError
from vescale_parallel._memory import tracing as traced_room
from vescale_parallel._memory.graph_copy import copied_module
from vescale_parallel._memory.program import Program
from vescale_parallel._memory.tracing import TracedGraph, Tracing, trace_program


def of_function(function: Callable[..., Any], *inputs: Any) -> TracedGraph:
    return trace_program(make_fx(function, tracing_mode="fake")(*inputs), None)


def named(found: TracedGraph, part: str) -> list[int]:
    return [at for at, node in enumerate(found.nodes) if part in node.name]


def any_order(of: Program, seed: int) -> list[int]:
    """A random order that keeps to what waits for what."""
    draw, order = random.Random(seed), list[int]()
    while len(order) < len(of):
        ready = [at for at in range(len(of)) if at not in order and of.before[at] <= {*order}]
        order.append(draw.choice(ready))
    return order


def test_views_keep_their_storage_alive():
    found = of_function(lambda x: ((x * 2).t().reshape(-1)[3:] + 1, x.sum()), torch.ones(4, 1))
    (made,) = [one for one in found.program.storages if one.name.startswith("mul")]
    assert {found.nodes[at].name.split("_")[0] for at in made.users} >= {"mul", "t", "add"}
    assert made.bytes == 16
    assert [one.kept for one in found.program.storages] == [False, True, True]


def test_inputs_and_constants_are_not_counted():
    module = nn.Linear(4, 4)
    found = trace_program(fx.symbolic_trace(module), [torch.ones(2, 4)])
    assert [one.bytes for one in found.program.storages] == [32]


def in_place(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = x * 2
    b = a + 1
    view = a[1:]
    view.add_(y[1:])
    c = a * b
    a.zero_()
    y.copy_(c)
    return a + c, y * 1


@pytest.mark.parametrize("seed", range(6))
def test_any_allowed_order_computes_the_same(seed: int):
    inputs = torch.arange(4.0), torch.full((4,), 3.0)
    module = make_fx(in_place, tracing_mode="fake")(*inputs)
    found = trace_program(module, None)
    env = dict(
        zip(module.graph.find_nodes(op="placeholder"), map(torch.clone, inputs), strict=True)
    )
    for at in any_order(found.program, seed):
        node = found.nodes[at]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = node.target(*args, **kwargs)
    expected = in_place(*inputs)
    results = fx.node.map_arg(module.graph.output_node().args[0], env.__getitem__)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_draws_keep_their_order():
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return torch.rand_like(x), torch.randn(3), torch.bernoulli(x), torch.rand(2)

    found = of_function(function, torch.full((4,), 0.5))
    draws = [*named(found, "rand"), *named(found, "bernoulli")]
    assert len(draws) == 4
    for seed in range(4):
        assert [at for at in any_order(found.program, seed) if at in draws] == sorted(draws)


def test_modules_and_methods_are_seen_through():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))

        def forward(self, x: Tensor) -> Tensor:
            made = self.layers(x)
            made.mul_(2)
            return made.view(-1) + 1

    found = trace_program(fx.symbolic_trace(Net()), [torch.ones(3, 4)])
    assert found.writes  # running statistics
    linear, norm, _ = found.program.storages
    assert (linear.bytes, norm.bytes) == (96, 96)
    assert {found.nodes[at].name for at in norm.users} >= {"layers_1", "layers_2", "mul_", "view"}


UNPLANNED = [
    (lambda x: x.nonzero(), [torch.ones(3)], "shapes do not depend on data"),
    (lambda x: x[x > 0], [torch.ones(3)], "shapes do not depend on data"),
    (lambda x: x.item(), [torch.ones(1)], "shapes do not depend on data"),
    (lambda x: x + 1, None, "inputs="),
    (lambda x: x + 1, [torch.ones(1)] * 2, "1 inputs"),
    (lambda x: x @ x, [torch.ones(2, 3)], "matmul"),
]


@pytest.mark.parametrize(("function", "inputs", "words"), UNPLANNED)
def test_what_cannot_be_planned_is_told(function: Any, inputs: Any, words: str):
    with pytest.raises(ParallelError, match=words):
        trace_program(fx.symbolic_trace(function), inputs)


def test_symbolic_shapes_are_told_and_made_concrete_by_inputs():
    module = make_fx(lambda x: x.view(x.shape[0] * 2, -1) + 1, tracing_mode="symbolic")(
        torch.ones(4, 6)
    )
    with pytest.raises(ParallelError, match="symbolic shape"):
        trace_program(module, None)
    found = trace_program(module, [torch.ones(5, 8)])
    assert [one.bytes for one in found.program.storages if one.bytes] == [160]


def test_a_graph_that_was_changed_is_asked_of_what_is_new(monkeypatch: pytest.MonkeyPatch):
    def function(x: Tensor) -> list[Tensor]:
        made = (x * 2).t()
        made.add_(1)
        return [made.cos() @ x, torch.rand_like(x) + made, x.sum()]

    ran: list[str] = []
    run_new = traced_room._Interpreter._run_new
    monkeypatch.setattr(
        traced_room._Interpreter,
        "_run_new",
        lambda self, node: [ran.append(node.name), run_new(self, node)][1],
    )
    module, memory = make_fx(function, tracing_mode="fake")(torch.ones(3, 3)), Tracing()
    assert trace_program(module, None, memory=memory).program == trace_program(module, None).program
    copy, copies = copied_module(module)
    (product,) = (one for one in copies.values() if "mm" in one.name)
    with copy.graph.inserting_before(product):
        # The same operator on the same values: what it makes is another storage.
        again = copy.graph.node_copy(product.args[0])
    product.replace_input_with(product.args[0], again)
    copy.recompile()
    ran.clear()
    found = trace_program(copy, None, memory=memory)
    # Constants and inputs, the new node, who reads it, and the results.
    calls = [one.name for one in copy.graph.nodes if one.op == "call_function"]
    assert [one for one in ran if one in calls] == [again.name, product.name]
    assert found.program == trace_program(copy, None).program
    assert found.plain == trace_program(copy, None).plain


def test_what_changes_shapes_in_place_is_asked_anew():
    def function(x: Tensor) -> Tensor:
        made = x * 2
        made.unsqueeze_(0)
        return made + 1

    module, memory = make_fx(function, tracing_mode="fake")(torch.ones(3, 3)), Tracing()
    first, second = (trace_program(module, None, memory=memory) for _ in range(2))
    shapes = [[one.shape for one in found.results[found.nodes[-1]]] for found in (first, second)]
    assert shapes == [[(1, 3, 3)], [(1, 3, 3)]]
