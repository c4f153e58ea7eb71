"""Traced, every collective and its gradient are torch's functional collectives, with equal results.

By `make_fx` and by `torch.compile`, in one graph; on every rank the same collectives in the same
order, also where a rank has no use for what arrives.
"""

import pytest
import torch
import torch.distributed as dist
import vescale_comm as vc
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale_comm.testing import device_mesh, run


def exchanged(x):
    """Member i sends i + 1 rows to every member."""
    mine = x[: dist.get_rank() + 1]
    return vc.all_to_all([mine, mine], shapes=[(1, 2), (2, 2)])


def pieces(x):
    return vc.gather_pieces(x[: dist.get_rank()], shapes=[(0, 2), (1, 2)])


GROUPS = {}


def make_groups():
    """Before anything is traced: making a group is communication that no graph can hold."""
    mesh = device_mesh((2, 1), ("out", "in"))
    GROUPS.update({axis: vc.group_of(mesh, axis) for axis in ("out", "in")})


def hierarchical(x):
    return vc.all_reduce_hierarchical(x, GROUPS["in"], GROUPS["out"], op="avg")


LINEAR = {
    "all_reduce": lambda x: vc.all_reduce(x),
    "avg": lambda x: vc.all_reduce(x, op="avg"),
    "rank": lambda x: vc.all_reduce(x, order="rank"),
    "tree": lambda x: vc.all_reduce(x.repeat(600, 1), order="tree"),
    "wire": lambda x: vc.all_reduce(x, wire="bf16"),
    "handle": lambda x: vc.all_reduce(x, async_op=True).wait(),
    "all_gather": lambda x: vc.all_gather(x, dim=1),
    "uneven gather": lambda x: vc.all_gather(x[: 1 + dist.get_rank()], sizes=[1, 2]),
    "reduce_scatter": lambda x: vc.reduce_scatter(x),
    "uneven scatter": lambda x: vc.reduce_scatter(x, sizes=[4, 0], order="native"),
    "inner scatter": lambda x: vc.reduce_scatter(x, dim=1, op="avg"),
    "broadcast": lambda x: vc.broadcast(x, source=1),
    "scatter": lambda x: vc.scatter(x, source=1, sizes=[4, 0]),
    "scatter to two": lambda x: vc.scatter(x, source=1, sizes=[3, 1]),
    "permute": lambda x: vc.permute(x, pairs=[(0, 1)]),
    "shift": lambda x: vc.permute(x, pairs=[(0, 1), (1, 0)], shape=(4, 2)),
    "all_to_all": exchanged,
    "gather_pieces": pieces,
    "bucketed": lambda x: vc.all_reduce_bucketed([x, 2 * x, x[:0]], cap_bytes=40),
    "hierarchical": hierarchical,
}
OTHERS = {
    "max": lambda x: vc.all_reduce(x, op="max"),
    "complex": lambda x: vc.all_reduce(x.to(torch.complex64)),
    "product": lambda x: vc.all_reduce(x.to(torch.complex64), op="prod"),
    "bool": lambda x: vc.all_reduce(x > 0, op="bxor"),
    "fp8": lambda x: vc.all_gather(x.to(torch.float8_e4m3fn)).float(),
    "int16": lambda x: vc.broadcast(x.to(torch.int16)),
    "int8": lambda x: vc.reduce_scatter(x, wire="int8"),
    "in place": lambda x: vc.all_reduce_(x.clone(), op="avg"),
    "in place, later": lambda x: vc.all_reduce_(x.clone(), order="rank", async_op=True).wait(),
    "into": lambda x: vc.all_gather_into_tensor(x.new_empty(8, 2), x),
    "scattered into": lambda x: vc.reduce_scatter_tensor(x.new_empty(2, 2), x),
}


def given(rank, seed=0):
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * seed + rank))


def listed(x):
    return list(x) if isinstance(x, list | tuple) else [x]


def collectives(graph):
    """The collectives in a graph, in order, without the waiting."""
    names = [str(node.target) for node in graph.nodes if "c10d" in str(node.target)]
    assert all(name.startswith("_c10d_functional.") for name in names)
    return [name for name in names if "wait_tensor" not in name]


def same(found, expected):
    return all(map(torch.equal, listed(found), listed(expected)))


def symbolic(rank, world_size, mode):
    make_groups()
    found = {}
    # All of them by the mode that compilers use.
    step = 1 if mode == "fake" else 4
    linear, others = (dict(list(calls.items())[::step]) for calls in (LINEAR, OTHERS))
    for name, call in (linear | others).items():
        graph = make_fx(call, tracing_mode=mode)(given(rank))
        assert same(graph(given(rank, 1)), call(given(rank, 1))), name
        found[name] = collectives(graph.graph)
    for name, call in linear.items():

        def gradient(x, call=call):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(sum(y.square().sum() for y in listed(call(x))), x)[0]

        graph = make_fx(lambda x: gradient(x), tracing_mode=mode)(given(rank))
        assert same(graph(given(rank, 1)), gradient(given(rank, 1))), name
        found[f"gradient of {name}"] = collectives(graph.graph)
    return found


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_writes_down_functional_collectives(mode):
    first, second = run(symbolic, 2, mode)
    assert first == second
    assert all(first.values())
    assert len(first["gradient of all_reduce"]) == 2


WARM = {
    "all_reduce": lambda g: vc.all_reduce(g),
    "all_gather": lambda g: vc.all_gather(g)[:4],
    "reduce_scatter": lambda g: vc.reduce_scatter(g).repeat(2, 1),
}


class Backward(torch.autograd.Function):
    """Calls a collective directly in its backward."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x * 2

    backward = staticmethod(lambda ctx, grad: (ctx.call(grad), None))


def warm(rank, world_size, mode):
    found = {}
    for name, call in WARM.items():

        def gradient(x, call=call):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(Backward.apply(x, call).square().sum(), x)[0]

        gradient(given(rank))  # from here on the call takes its shortest road
        graph = make_fx(lambda x: gradient(x), tracing_mode=mode)(given(rank))
        assert same(graph(given(rank, 1)), gradient(given(rank, 1))), name
        found[name] = collectives(graph.graph)
    return found


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_collectives_called_before_are_written_down_in_a_backward(mode):
    first, second = run(warm, 2, mode)
    assert first == second
    assert [len(names) for names in first.values()] == [1, 1, 1]


def compiled(rank, world_size):
    torch._dynamo.reset()
    make_groups()
    graphs = []

    def keep(graph, _):
        graphs.append(collectives(graph.graph))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)

    def inference(x):
        return [y for call in (LINEAR | OTHERS).values() for y in listed(call(x))]

    def training(x):
        results = [y for call in LINEAR.values() for y in listed(call(x))]
        return sum((y * (i + 1)).square().sum() for i, y in enumerate(results))

    x = given(rank, 2)
    made = torch.compile(inference, backend=backend, fullgraph=True)
    assert same(made(x), inference(x))
    with vc.trace() as t:
        made(x)
    assert t.records == []  # what is compiled is not ours any more
    ours, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.compile(training, backend=backend, fullgraph=True)(ours).backward()
    training(eager).backward()
    torch.testing.assert_close(ours.grad, eager.grad)
    return graphs


@pytest.mark.filterwarnings("ignore")  # torch's compiler has many of its own
def test_torch_compile_makes_one_graph_of_functional_collectives():
    first, second = run(compiled, 2, timeout=200)
    assert first == second
    inference, forward, backward = first
    assert len(inference) >= len(LINEAR | OTHERS)
    assert len(forward) >= len(LINEAR)
    assert len(backward) >= len(LINEAR)


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def test_eight_ranks_are_traced_in_one_process(fake_world):
    group = vc.group_of(fake_world, "tp")

    def step(x):
        x = x.detach().requires_grad_()
        y = vc.all_gather(x, group, dim=1).relu() @ torch.ones(8, 3)
        return torch.autograd.grad(vc.reduce_scatter(y, group).sum(), x)

    graph = make_fx(step, tracing_mode="fake")(torch.ones(4, 2))
    assert collectives(graph.graph) == [
        f"_c10d_functional.{name}.default"
        for name in (
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
        )
    ]
    with FakeTensorMode() as fake:
        x = torch.empty(2, 3)
        assert vc.all_gather(x, group, sizes=[5, 2, 0, 1]).shape == (8, 3)
        assert vc.all_reduce(x, group, wire="int8").fake_mode is fake


def test_shapes_may_be_symbols(fake_world):
    group = vc.group_of(fake_world, "tp")

    def step(x):
        whole = vc.all_gather(x, group, dim=1)
        parts = (
            vc.reduce_scatter(whole, group, dim=1),
            vc.broadcast(x, group),
            vc.permute(x, group, pairs=[(0, 1), (1, 2), (2, 3), (3, 0)]),
        )
        return [*parts, vc.all_reduce(x, group, order="tree"), vc.all_reduce(x, group, wire="int8")]

    graph = make_fx(step, tracing_mode="symbolic")(torch.ones(8, 6))
    assert any("sym_size" in str(node.target) for node in graph.graph.nodes)
    assert [tuple(y.shape) for y in graph(torch.ones(12, 10))] == [(12, 10)] * 5


NOT_FUNCTIONAL = [
    (lambda x: vc.send(x, target=0), "send cannot be traced"),
    (lambda x: vc.barrier() or x, "barrier cannot be traced"),
    (
        lambda x: vc.all_reduce(x, wire="int8", feedback=vc.Feedback()),
        "feedback= changes from call",
    ),
]


@pytest.mark.parametrize(("call", "words"), NOT_FUNCTIONAL)
def test_what_has_no_functional_form_says_so(fake_world, call, words):
    with pytest.raises(vc.CommArgumentError, match=words):
        make_fx(call)(torch.ones(2))
