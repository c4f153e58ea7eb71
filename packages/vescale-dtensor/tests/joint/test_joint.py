"""The joint graph of a step gives the bits of eager mode: loss, gradients, buffers, generator.

Over several steps of models with dropout, norms with running statistics and attention; on one
device, data parallel, tensor parallel and both.
"""

import copy
import re

import pytest
import torch
import vescale_dtensor as vd
from joint_models import MODELS, batch, built, locals_of, mesh_of
from vescale_comm import simulate
from vescale_comm.testing import run


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
