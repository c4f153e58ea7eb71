"""ZeRO's gathers and reductions, clipping and the optimizer are nodes: the bits of eager mode.

Whole training steps of a model of several units, over steps of a schedule of the learning rate,
levels 1 to 3, as traced and with collectives merged and moved; what goes on after is eager again.
"""

import pytest
import torch
from graph_models import TENSOR, Net, batch
from torch import nn, optim
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_comm import simulate
from vescale_comm.testing import on_ranks, run
from vescale_dtensor import CaptureError
from vescale_parallel import Plan, graph, memory, mesh, parallelize
from vescale_parallel._graph.collectives import collectives

STEPS = 6


def a_net():
    """Three units and the root; a parameter that nothing uses, and one that does not train."""
    net = Net(3)
    net.blocks[1].spare = nn.Parameter(torch.ones(3))
    net.blocks[2].norm.weight.requires_grad_(False)
    return net


def built(sizes, level):
    torch.manual_seed(0)
    rules = TENSOR if "tp" in sizes else {"*": "replicate"}
    plan = Plan(axes=tuple(sizes), batch="dp:0", parameters=rules, zero=level)
    model = parallelize(a_net(), mesh(**sizes), plan)
    adam = optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.02)
    return model, adam, optim.lr_scheduler.OneCycleLR(adam, 0.05, total_steps=STEPS + 2)


def eager_step(model, adam, tokens, max_norm):
    adam.zero_grad()
    loss = model(tokens)
    loss.backward()
    norm = loss
    if max_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_([p for g in adam.param_groups for p in g["params"]],
                                              max_norm)  # fmt: skip
    adam.step()
    return loss, norm


def result(model, adam, loss, norm):
    values = [getattr(p, "_local_tensor", p) for p in model.state_dict().values()]
    states = [one for state in adam.state.values() for one in state.values()]
    values += [getattr(one, "_local_tensor", one) for one in states]
    return [loss.full_tensor(), norm.full_tensor(), torch.get_rng_state(), *values]


def trained(rank, world_size, sizes, level, max_norm, steps=STEPS):
    eager, first, one = built(sizes, level)
    model, second, other = built(sizes, level)
    whole = graph.train_step(model, lambda tokens: model(tokens), batch(0))
    whole = whole.with_optimizer(second, max_norm=max_norm)
    plain = whole.graph_module
    runs = [
        plain,
        graph.schedule(plain, cap_bytes=4000, ahead_bytes=4000).graph_module,
        graph.schedule(plain, buckets=[["blocks.*"]]).graph_module,
    ]
    if "tp" not in sizes:
        runs.append(memory.plan(runs[1], solver="rules", seconds=0).run)
    for at in range(steps):
        found = []
        torch.manual_seed(at)
        found.append(result(eager, first, *eager_step(eager, first, batch(at), max_norm)))
        torch.manual_seed(at)
        made = whole.running(runs[at % len(runs)])(batch(at))
        loss, norm = made if max_norm is not None else (made, made)
        found.append(result(model, second, loss, norm))
        assert all(map(torch.equal, *found)), (at, list(map(torch.equal, *found)))
        one.step()
        other.step()
    # Eager steps go on from it, with what is gathered anew.
    found = []
    for each, adam in ((eager, first), (model, second)):
        torch.manual_seed(STEPS)
        found.append(result(each, adam, *eager_step(each, adam, batch(STEPS), max_norm)))
    assert all(map(torch.equal, *found))
    told = [collectives(one.graph) for one in runs[:3]]
    return [[(one.kind, one.ranks, one.bytes) for one in each] for each in told]


def gathers(told):
    return sum(kind == "all_gather" for kind, *_ in told)


@pytest.mark.parametrize(("level", "max_norm"), [(3, 0.3), (2, None)])
def test_bits_of_eager_mode(level, max_norm):
    first, second = simulate(2).run(trained, {"dp": 2}, level, max_norm)
    assert first == second
    plain, merged, layers = first
    # The root and three units, of which the last has a buffer for what does not train; at level 3
    # the two units before it come again for the backward.
    assert gathers(plain) == (7 if level == 3 else 5)
    assert sum(kind == "reduce_scatter" for kind, *_ in plain) == 4
    assert gathers(merged) < gathers(plain)
    assert len(layers) < len(plain)


@pytest.mark.parametrize("size", [2, 4])
def test_bits_of_eager_mode_of_processes(size):
    """Gradients are exchanged over gloo, and each rank adds up its part: in buckets, too."""
    everyone = run(trained, size, {"dp": size}, 3, 0.3, 4)
    assert all(one == everyone[0] for one in everyone)
    plain, _, layers = everyone[0]
    exchanges = [sum(kind == "all_to_all" for kind, *_ in one) for one in (plain, layers)]
    # The root's, and those of three units as one.
    assert exchanges == [4, 2]


def gradients(rank, world_size):
    """Without an optimizer, gradients are set; what no_sync keeps is refused."""
    eager, model = (built({"dp": 2}, 3)[0] for _ in range(2))
    whole = graph.train_step(model, lambda tokens: model(tokens), batch(0))
    torch.manual_seed(1)
    eager(batch(1)).backward()
    torch.manual_seed(1)
    whole(batch(1))
    for (name, p), q in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor()), name
    with pytest.raises(CaptureError, match="has a gradient already"):
        whole(batch(1))
    model.zero_grad()
    with pytest.raises(CaptureError, match="another kind of call"):
        whole(batch(1)[:2])
    return True


def stored_itself(rank, world_size):
    model = built({"dp": 2}, 3)[0]
    weight = model.blocks[0].norm.weight  # what is stored, and is never gathered
    with pytest.raises(CaptureError, match=r"stored parameter 'blocks\.0\.norm\.weight' itself"):
        graph.train_step(model, lambda tokens: model(tokens) + weight.sum(), batch(0))
    whole = graph.train_step(model, lambda tokens: model(tokens), batch(0))
    model.blocks[0].norm.weight.requires_grad_(False)
    with pytest.raises(graph.GraphError, match="requires_grad of"):
        whole(batch(0))
    return True


def test_stored_parameters_are_gathered_or_refused():
    assert all(simulate(2).run(stored_itself))


def test_gradients_are_set():
    assert all(simulate(2).run(gradients))


@pytest.mark.parametrize("level", [0, 3])
@on_ranks(2, simulated=True)
def test_momentum(level: int):
    """The first step of SGD with momentum only copies gradients: summed ones, at level 0 too."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        plan = Plan(batch="dp:0", zero=level)
        model = parallelize(Net(2), mesh(dp=2, device_type="cpu"), plan)
        models.append((model, optim.SGD(model.parameters(), 0.1, momentum=0.9)))
    (eager, one), (traced, other) = models
    step = graph.train_step(traced, traced, batch(0)).with_optimizer(other)
    for seed in range(3):
        one.zero_grad()
        torch.manual_seed(seed)
        eager(batch(seed)).backward()
        one.step()
        torch.manual_seed(seed)
        step(batch(seed))
    for own, expected in zip(traced.parameters(), eager.parameters(), strict=True):
        assert torch.equal(own.to_local(), expected.to_local())


@pytest.fixture(scope="module")
def doubled():
    return make_fx(lambda x: (x.sin() * x.cos()).sum(), tracing_mode="fake")(torch.ones(64))


@pytest.mark.parametrize("function", [graph.offload, graph.recompute])
@pytest.mark.parametrize("said", ["1KiB", "1.024KB", "1024", 1024, 1024.9])
def test_bytes_as_number_or_text(doubled, function, said):
    assert function(doubled, said).peak <= 1024


@pytest.mark.parametrize("function", [graph.offload, graph.recompute])
@pytest.mark.parametrize("said", ["much", "", "12 apples", 0, -5, True, None, float("nan"), [1]])
def test_anything_else_is_refused_by_name(doubled, function, said):
    with pytest.raises(graph.GraphError, match=r"memory_bytes=.*a number of bytes, at least one"):
        function(doubled, said)
