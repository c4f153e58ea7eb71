"""The joint graph of a step gives the bits of eager mode: loss, gradients, buffers, generator.

Over several steps of models with dropout, norms with running statistics and attention; on one
device, data parallel, tensor parallel and both.
"""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from torch import nn
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Replicate, Shard


class Llama(nn.Module):
    """A block of rotary attention and a gated layer, under a loss over the vocabulary."""

    def __init__(self, size=16, heads=4, words=24, p=0.1):
        super().__init__()
        self.heads, self.p = heads, p
        self.embed = nn.Embedding(words, size)
        self.norm = nn.RMSNorm(size)
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(size, 2 * size), nn.Linear(size, 2 * size)
        self.down, self.head = nn.Linear(2 * size, size), nn.Linear(size, words, bias=False)

    def turned(self, x):
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2])[:, None] / (1 + torch.arange(half))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(self, words):
        x = self.embed(words[:, :-1])
        y = self.norm(x)
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for m in (self.q, self.k, self.v))  # fmt: skip
        mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + F.dropout(self.o(mixed.transpose(1, 2).flatten(2)), self.p, self.training)
        y = self.norm(x)
        x = x + F.dropout(self.down(F.silu(self.gate(y)) * self.up(y)), self.p, self.training)
        return F.cross_entropy(self.head(x).flatten(0, 1), words[:, 1:].flatten())


class Net(nn.Module):
    """Layers with biases, batch norm's running statistics, and a parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 12)
        self.up, self.norm, self.down = nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Linear(20, 1)
        self.drop, self.spare = nn.Dropout(0.3), nn.Parameter(torch.ones(3))
        self.same = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.one, self.two = self.same

    def forward(self, words):
        x = self.drop(self.norm(self.up(self.embed(words).mean(1)).relu()))
        # Two gradients that are one tensor in backward.
        return (self.down(x) ** 2).mean() + (self.one + self.two).sum()


CUT = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "o": 1, "down": 1, "head": 0}
MODELS = {"llama": Llama, "net": Net}


def built(kind, mesh):
    torch.manual_seed(0)
    model = MODELS[kind]()
    if "tp" in mesh.mesh_dim_names:
        for name, module in model.named_modules():
            if kind == "llama" and name in CUT:
                for part, p in list(module.named_parameters()):
                    whole = part == "bias" and CUT[name] == 1
                    layout = [Replicate()] * (mesh.ndim - 1)
                    layout.append(Replicate() if whole else Shard(CUT[name]))
                    setattr(module, part, nn.Parameter(vd.distribute_tensor(p.data, mesh, layout)))
    return vd.distribute_module(model, mesh)


def batch(mesh, step):
    words = torch.randint(24, (5, 7), generator=torch.Generator().manual_seed(step))
    layout = [Shard(0) if name == "dp" else Replicate() for name in mesh.mesh_dim_names]
    return vd.distribute_tensor(words, mesh, layout, src_data_rank=None)


def locals_of(values):
    return [getattr(value, "_local_tensor", value) for value in values]


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


def mesh_of(axes, world_size):
    sizes = {"dp": (world_size,), "tp": (world_size,), "dp tp": (2, 2)}[axes]
    return device_mesh(sizes, tuple(axes.split()))


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
        assert any(re.search(r"test_joint.py:\d+", one.line) for one in labels)
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
