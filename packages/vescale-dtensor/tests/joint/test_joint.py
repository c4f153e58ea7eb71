"""The joint graph of a step gives the bits of eager mode: loss, gradients, buffers, generator.

Over several steps of models with dropout, norms with running statistics and attention; on one
device, data parallel, tensor parallel and both.
Every draw of a joint graph stays, used or not, equal to another or not: it moves the stream.
Every draw of a joint graph stays, used or not, equal to another or not: it moves the stream. What
no joint graph can hold is refused with words, and a graph runs for its own kind of call.
"""

import copy
import gc
import re

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
import vescale_rng
from joint_models import MODELS, batch, built, locals_of, mesh_of
from torch import nn
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import CaptureError, Partial, Replicate, Shard, gradient_total, joint


def compared(mesh, kind, steps=3):
    """Train eagerly and by the joint graph; returns the graph."""
    eager = built(kind, mesh)
    twin = copy.deepcopy(eager)
    captured = vd.capture(twin)
    words = batch(mesh, 0)
    torch.manual_seed(1)
    captured(words)  # recorded; what it changed is set back
    twin.load_state_dict(eager.state_dict())
    state = torch.get_rng_state()
    whole = vd.joint(captured, words)
    assert torch.equal(torch.get_rng_state(), state)  # tracing draws nothing
    sgd = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (eager, twin)]
    for step in range(steps):
        words, found = batch(mesh, step), []
        for model, call, optimizer in ((eager, eager, sgd[0]), (twin, whole, sgd[1])):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = call(words)
            if model is eager:
                loss.backward()
            grads = [None if p.grad is None else vd.gradient_total(p) for p in model.parameters()]
            optimizer.step()
            values = locals_of([*grads, *model.state_dict().values()])
            found.append([loss.full_tensor(), *values, torch.get_rng_state()])
        for at, (one, two) in enumerate(zip(*found, strict=True)):
            assert (one is None) == (two is None), at
            assert one is None or torch.equal(one, two), (step, at)
    memory = [p.grad._local_tensor.data_ptr() for p in twin.parameters() if p.grad is not None]
    assert len(set(memory)) == len(memory)
    return whole


def on_a_rank(rank, world_size, axes):
    mesh, said = mesh_of(axes, world_size), []
    for kind in ("llama",) if "tp" in axes else MODELS:
        whole = compared(mesh, kind)
        nodes = list(whole.graph_module.graph.nodes)
        names = [str(n.target) for n in nodes if "c10d" in str(n.target)]
        assert all(n.startswith("_c10d_functional.") for n in names)
        said.append([name for name in names if "wait" not in name])
        labels = [n.meta["label"] for n in nodes if n.op == "call_function"]
        assert {one.direction for one in labels} >= {"forward", "backward"}
        assert any(re.search(r"joint_models.py:\d+", one.line) for one in labels)
        modules = {(one.module, one.direction) for one in labels if one.module}
        assert {
            (name, way) for name in ("up", "down") for way in ("forward", "backward")
        } <= modules
        assert {"embed.weight", "down.bias"} <= {n.meta.get("parameter") for n in nodes}
    return said


@pytest.mark.parametrize(("axes", "ranks"), [("dp", 1), ("dp", 2), ("tp", 2), ("dp tp", 4)])
def test_bits_of_eager_mode(axes, ranks):
    first, *others = simulate(ranks).run(on_a_rank, axes)
    assert all(one == first for one in others)
    assert ranks == 1 or all(first)


def compiled(rank, world_size):
    mesh = mesh_of("dp", world_size)
    model, words = built("llama", mesh), batch(mesh, 0)
    whole = vd.joint(vd.capture(model), words)
    found = []
    for run_ in (whole.graph_module, torch.compile(whole.graph_module, backend="aot_eager",
                                                   fullgraph=True)):  # fmt: skip
        model.zero_grad()
        torch.manual_seed(3)
        loss = whole.running(run_)(words)
        grads = locals_of(p.grad for p in model.parameters())
        found.append([loss._local_tensor, *grads, torch.get_rng_state()])
    return all(map(torch.equal, *found))


@pytest.mark.slow
def test_compiled_without_a_break_it_has_the_same_bits():
    assert all(run(compiled, 2, timeout=250))


def test_bits_of_eager_mode_in_processes():
    assert all(run(on_a_rank, 2, "dp"))


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


def layer(mesh, **options):
    torch.manual_seed(0)
    return vd.distribute_module(nn.Linear(4, 3, **options), mesh)


def distributed(mesh, *shape):
    return vd.distribute_tensor(torch.ones(shape), mesh, [Shard(0)], src_data_rank=None)


def refused(words, call, *args):
    with pytest.raises(CaptureError, match=words):
        call(*args)


def hooked(model):
    def step(x):
        y = model(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y.square().mean()

    return step


def refusals(rank, world_size):
    mesh = device_mesh((world_size,), ("dp",))
    x, model = distributed(mesh, 4, 4), layer(mesh)
    refused("returned", joint, model, x)

    def step(x):
        return model(x).square().mean()

    captured = vd.capture(step)
    needs = x.detach().requires_grad_()
    refused("argument of the step requires grad", joint, captured, needs)
    refused("one element", joint, vd.capture(lambda x: model(x)), x)
    refused("one element", joint, vd.capture(lambda x: ("loss", model(x).sum())), x)
    refused("a hook on an activation", joint, vd.capture(hooked(model)), x)
    refused("a backward runs inside", joint, vd.capture(backward_inside(model)), x)
    refused("no parameter", joint, vd.capture(lambda x: (x * 2).sum()), x)
    plain = torch.ones(3, requires_grad=True)
    refused("plain tensor", joint, vd.capture(lambda x: (model(x) * plain).sum()), x)
    average = vd.DTensor.from_local(torch.ones(4), mesh, [Partial("avg")]).requires_grad_()
    if world_size > 1:
        refused("avg", joint, vd.capture(lambda x: (x * average).sum()), x)
    hook = model.weight.register_post_accumulate_grad_hook(lambda p: None)
    refused("'weight' has gradient hooks", joint, captured, x)
    hook.remove()
    model.zero_grad()
    whole = joint(captured, x)
    whole(x)
    refused("has a gradient already", whole, x)
    model.zero_grad()
    refused("another kind of call", whole, distributed(mesh, 8, 4))
    assert not whole(x).requires_grad
    assert model.weight.grad is not None
    return True


def late(rank, world_size):
    """Rank 0 fills a cache in its first call, which is run and not recorded."""
    mesh = device_mesh((world_size,), ("dp",))
    model, x, cache = layer(mesh), distributed(mesh, 4, 4), {}

    def step(x):
        if not (cache or mesh.get_local_rank()):
            cache[0] = 1
        return model(x).square().mean().redistribute(placements=[Replicate()])  # communicates

    whole = joint(vd.capture(step), x)
    found = [whole(x).full_tensor(), gradient_total(model.weight).full_tensor()]
    model.zero_grad()
    loss = step(x)
    loss.backward()
    expected = [loss.full_tensor(), gradient_total(model.weight).full_tensor()]
    return all(map(torch.equal, found, expected))


def test_ranks_that_record_at_different_calls_make_as_many():
    assert all(simulate(2).run(late))


def backward_inside(model):
    def step(x):
        model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    return step


@pytest.mark.parametrize("ranks", [1, 2])
def test_refusals(ranks):
    assert all(simulate(ranks).run(refusals))
