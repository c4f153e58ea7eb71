"""A decoder's step, scheduled and planned, has the bits of eager mode; ranks that differ refuse.

Data parallel, tensor and sequence parallel, and both, with dropout.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_comm import all_reduce, group_of, simulate
from vescale_comm.testing import run
from vescale_dtensor import capture, gradient_total, joint
from vescale_parallel import Plan, graph, memory, mesh, parallelize
from vescale_parallel._graph.collectives import collectives

PLAN = Plan(
    axes=("dp", "tp"),
    batch="dp:0",
    parameters={
        "embed.weight": "tp:0",
        "*.{q,k,v,up}.{weight,bias}": "tp:0",
        "*.{out,down}.weight": "tp:1",
        "head.weight": "tp:0",
        "*": "replicate",
    },
    activations={
        "embed": "-> tp:1",
        "blocks.*.{attention,mlp}": "tp:full -> tp:1",
        "head": "tp:full ->",
    },
)


class Attention(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for part in (self.q, self.k, self.v))  # fmt: skip
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(size, 24), nn.Linear(24, size), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, size, heads=4):
        super().__init__()
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention, self.mlp = Attention(size, heads), Feed(size)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Decoder(nn.Module):
    """As GPT-2 is, small."""

    def __init__(self, words=32, size=16):
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(1))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, words, bias=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


WORDS = 32
LINK = graph.Link(latency=5e-6, bandwidth=1e9)


def built(sizes):
    torch.manual_seed(0)
    return parallelize(Decoder(), mesh(**sizes), PLAN)


def stepped(model, call, step):
    torch.manual_seed(step)
    tokens = torch.randint(WORDS, (4, 8))
    model.zero_grad()
    loss = call(tokens, tokens)
    if loss.requires_grad:
        loss.backward()
    totals = [gradient_total(p)._local_tensor for p in model.parameters()]
    return [loss.full_tensor(), *totals, torch.get_rng_state()]


def trained(rank, world_size, sizes):
    eager, model = built(sizes), built(sizes)
    tokens = torch.randint(WORDS, (4, 8))
    whole = joint(capture(model), tokens, tokens)
    plain = whole.graph_module
    layers = graph.schedule(plain, buckets=["head", ["blocks.*", "norm"], "embed"], link=LINK)
    auto = graph.schedule(plain, memory_bytes=1 << 30)
    # Of what costs nothing a bucket is as large as all, or as small as can be.
    free = graph.Link(latency=1e-6, bandwidth=float("inf"))
    assert len(graph.schedule(plain, link=free).buckets) <= len(auto.buckets)
    runs = [plain, layers.graph_module, auto.graph_module]
    if sizes["tp"] == 1:
        plan = memory.plan(auto.graph_module, solver="rules", seconds=0)
        assert plan.peak <= plan.program_peak
        runs.append(plan.run)
    for at, one in enumerate(runs):
        found = stepped(model, whole.running(one), at)
        assert all(map(torch.equal, found, stepped(eager, eager, at))), at
    count = [len(collectives(module.graph)) for module in runs[:3]]
    assert count[1] < count[0]
    rates = {"link": LINK, "flops": 1e10, "memory_bandwidth": 1e10}
    lines = [graph.timeline(module, **rates) for module in runs[:3]]
    return [one.buckets for one in (layers, auto)], count, lines


def test_bits_of_eager_mode():
    first, *others = simulate(4).run(trained, {"dp": 2, "tp": 2})
    for plans, count, lines in others:
        assert (plans, count) == first[:2]
        assert len(lines) == 3
    plain, _, auto = first[2]
    assert plain.computing == pytest.approx(auto.computing, rel=0.1)
    assert auto.exposed <= auto.communicating + 1e-12
    assert auto.exposed < plain.exposed
    assert auto.seconds < plain.seconds
    events = json.loads(auto.to_perfetto())["traceEvents"]
    assert len(events) == len(auto.spans) + 2
    assert auto.to_svg().count("<rect") == len(auto.spans)


def test_bits_of_eager_mode_in_processes():
    first, second = run(trained, 2, {"dp": 2, "tp": 1})
    assert first[:2] == second[:2]


def refusals(rank, world_size):
    group = group_of(mesh(dp=2), "dp")

    def traced(function):
        return make_fx(function, tracing_mode="fake")(torch.ones(4))

    def refused(words, module, **options):
        with pytest.raises((graph.DisagreementError, graph.GraphError), match=words):
            graph.schedule(module, **options)

    same = traced(lambda x: all_reduce(x, group) + all_reduce(x * 2, group))
    refused(
        "number 1': .*all_reduce.* on rank 0; not there on rank 1",
        same if rank == 0 else traced(lambda x: all_reduce(x, group)),
    )
    other = traced(lambda x: all_reduce(x, group, op="max") + all_reduce(x * 2, group))
    refused(r"number 0': all_reduce\(sum\)", same if rank == 0 else other)
    refused(
        "has 5 elements on rank 1, and 4", traced(lambda x: all_reduce(x.new_ones(4 + rank), group))
    )
    refused("no schedule .* lives in 8 bytes", same, memory_bytes=8)
    refused("no parameter, module or glob", same, buckets=["blocks"])
    refused("'auto'", same, buckets="all")
    refused("'memory_bytes': 1000 on rank 0; 1001 on rank 1", same, memory_bytes=1000 + rank)
    refused("'overlap': True on rank 0", same, overlap=rank == 0)
    refused("cap_bytes=0: .*at least one", same, cap_bytes=0)
    refused("ahead_bytes='a few'", same, ahead_bytes="a few")
    # On one rank: the other is told, and does not wait.
    refused("memory_bytes.*='much'", same, memory_bytes="1KiB" if rank == 0 else "much")
    assert len(graph.schedule(same, cap_bytes="1KiB", memory_bytes="1GB").buckets) == 1
    unwaited = traced(lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", group.tag))
    refused("rank 1: .*not waited for", same if rank == 0 else unwaited)
    assert len(graph.schedule(same).buckets) == 1
    return True


def test_ranks_that_differ_refuse_on_all():
    assert all(simulate(2).run(refusals))
