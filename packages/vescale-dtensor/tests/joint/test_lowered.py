"""A graph as it is executed calls the operators of the graph, less views, and has its bits."""

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from vescale_dtensor._joint.lowering import FUNCTIONS, LoweredGraph, lower_graph

aten = torch.ops.aten
ARGUMENTS = {
    aten.as_strided.default: lambda x: ((x, (2, 2), (4, 1), 3), {}),
    aten.bmm.default: lambda x: ((x[None], x[None]), {}),
    aten.cat.default: lambda x: (([x, x], 1), {}),
    aten.mean.dim: lambda x: ((x, [1], True), {"dtype": torch.float64}),
    aten.pow.Tensor_Scalar: lambda x: ((x, 2), {}),
    aten.sum.dim_IntList: lambda x: ((x, [0], True), {"dtype": torch.float64}),
    aten.transpose.int: lambda x: ((x, 0, 1), {}),
    **{one: lambda x: ((x, x), {"alpha": 0.5}) for one in (aten.add.Tensor, aten.sub.Tensor)},
    **{one: lambda x: ((x, 2.0), {}) for one in (aten.mul.Tensor, aten.div.Tensor)},
    aten.mm.default: lambda x: ((x, x), {}),
    aten.clone.default: lambda x: ((x,), {"memory_format": torch.contiguous_format}),
}


class Calls(TorchDispatchMode):
    """Notes the overloads that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def calls_of(function, *args, **kwargs):
    with Calls() as calls:
        result = function(*args, **kwargs)
    return calls.seen, result


@pytest.mark.parametrize("overload", FUNCTIONS, ids=str)
def test_functions_call_the_very_overload(overload):
    args, kwargs = ARGUMENTS.get(overload, lambda x: ((x,), {}))(torch.rand(4, 4))
    called, found = calls_of(FUNCTIONS[overload], *args, **kwargs)
    expected = overload(*args, **kwargs)
    assert called == [overload]
    assert torch.equal(found, expected)
    assert (found.stride(), found.storage_offset()) == (
        expected.stride(),
        expected.storage_offset(),
    )


def step(x: Tensor, w: Tensor) -> list[Tensor]:
    flat = torch.cat([w.reshape(-1), x.reshape(-1)])
    first, second = flat[:16].view(4, 4).t(), flat[16:].view(4, 4)
    again = flat[:16].view(4, 4).t()
    made = (x @ first).view(2, 2, 4).transpose(0, 1) + (second @ again).view(2, 2, 4)
    halves = made[0].t().reshape(2, 4)  # copies: no view of what it looks like
    halves.add_(1)
    first.mul_(2)  # a view in the middle is written to, and seen by all
    return [made, halves, flat, first, again, x.t().t()]


def views_in(called):
    names = ("view", "_unsafe_view", "slice", "t", "transpose", "detach", "as_strided", "select")
    return [one for one in called if one._schema.name.removeprefix("aten::") in names]


def test_bits_and_operators_stay():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    module = make_fx(step, tracing_mode="fake")(x, w)
    made = lower_graph(module)
    (before, expected), (after, found) = calls_of(module, x, w), calls_of(made, x, w)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    looked, looks = views_in(before), views_in(after)
    assert len(looks) < len(looked)
    assert [one for one in after if one not in looks] == [
        one for one in before if one not in looked
    ]
    # A result that is an alias of an input stays another tensor.
    assert found[-1] is not x
    assert found[-1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_graph_that_changes_shapes_in_place_keeps_its_views():
    def function(x: Tensor) -> Tensor:
        made = x @ x
        one = made.t()
        made.unsqueeze_(0)
        return one + made.squeeze(0).t()

    x = torch.randn(3, 3)
    assert torch.equal(lower_graph(make_fx(function, tracing_mode="fake")(x))(x), function(x))


def test_what_is_given_to_modules_stays():
    class Doubled(torch.nn.Module):
        def forward(self, x, y):
            return x * 2 + y

    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(aten.mm.default, (x, x))
    views = [graph.call_function(aten.view.default, (product, [9])) for _ in range(2)]
    graph.output(graph.call_module("doubled", tuple(views)))
    module = fx.GraphModule({"doubled": Doubled()}, graph)
    with torch._subclasses.FakeTensorMode():
        x.meta["val"] = torch.empty(3, 3)
        product.meta["val"] = torch.mm(x.meta["val"], x.meta["val"])
        for one in views:
            one.meta["val"] = product.meta["val"].view(9)
    calls = [node for node in lower_graph(module).graph.nodes if node.op == "call_module"]
    first, second = calls[0].args
    assert first is not second


def test_a_graph_that_is_recompiled_runs_as_it_is_then():
    module = make_fx(lambda x: [x * 2], tracing_mode="fake")(torch.ones(2))
    run = LoweredGraph(module)
    assert run(torch.ones(2))[0].tolist() == [2, 2]
    (node,) = (one for one in module.graph.nodes if one.op == "call_function")
    node.args = (node.args[0], 3)
    module.recompile()
    assert run(torch.ones(2))[0].tolist() == [3, 3]


def test_places_are_found_anew():
    # A pass put a bucket in the place of a tensor that lay by itself, and `view` still says that.
    graph = fx.Graph()
    x = graph.placeholder("x")
    bucket = graph.call_function(aten.cat.default, ([x, x],))
    part = graph.call_function(aten.slice.Tensor, (bucket, 0, 4, 8))
    view = graph.call_function(aten.view.default, (part, [2, 2]))
    graph.output(graph.call_function(aten.neg.default, (view,)))
    with torch._subclasses.FakeTensorMode():
        x.meta["val"], view.meta["val"] = torch.empty(6), torch.empty(2, 2)
        bucket.meta["val"] = torch.empty(12)
        part.meta["val"] = bucket.meta["val"][4:8]
    module = fx.GraphModule({}, graph)
    values = torch.arange(6.0)
    assert torch.equal(lower_graph(module)(values), module(values))
