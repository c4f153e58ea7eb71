"""What is gathered ahead fits into memory that is bounded, and one unit at most is ahead.

Live bytes are simulated for the scheduled graph, and counted by the allocator as well.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn, optim
from vescale_comm import simulate
from vescale_parallel import Plan, graph, memory, mesh, parallelize
from vescale_parallel._graph.collectives import collectives

WORDS = 40
# Bytes for which some collectives may be merged, and not all.
ROOM = 85_000, 120_000


class Net(nn.Module):
    """Its peak is at the loss, when the last unit and the first one of the backward meet."""

    def __init__(self, size=32):
        super().__init__()
        self.embed = nn.Embedding(WORDS, size)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
            for _ in range(3)
        )
        self.head = nn.Linear(size, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def scheduled(rank, world_size):
    torch.manual_seed(0)
    plan = Plan(axes=("dp",), batch="dp:0", parameters={"*": "replicate"}, zero=3)
    model = parallelize(Net(), mesh(dp=world_size), plan)
    adam = optim.AdamW(model.parameters(), 0.01)
    tokens = torch.randint(WORDS, (4, 6))
    whole = graph.train_step(model, lambda x: model(x), tokens).with_optimizer(adam)
    bounded = graph.schedule(whole.graph_module, memory_bytes="traced")
    fitted = graph.schedule(whole.graph_module, memory_bytes=bounded.peak_before)
    free = graph.schedule(whole.graph_module)
    counted = 0
    given = whole.arguments(tokens)
    if rank == 0 and world_size == 1:
        with torch.no_grad():
            call = functools.partial(bounded.graph_module, *given)
            counted = memory.measured(call).peak
    roomy = [graph.schedule(whole.graph_module, memory_bytes=one) for one in ROOM]
    return bounded, free, fitted, under_way(bounded.graph_module), counted, roomy


def under_way(module):
    """The most gathers that are started and not waited for, and how many started ahead of use."""
    found = {one.start: one for one in collectives(module.graph) if one.kind == "all_gather"}
    waits = {one.wait for one in found.values()}
    now = most = ahead = 0
    for node in module.graph.nodes:
        now += (node in found) - (node in waits)
        most = max(most, now)
        ahead += node in found and node.next not in waits
    return most, ahead


@functools.cache
def on_two_ranks():
    return simulate(2).run(scheduled)


def test_gathers_ahead_are_bounded():
    for bounded, free, fitted, (most, ahead), *_ in on_two_ranks():
        assert bounded.peak < free.peak
        assert bounded.peak <= bounded.peak_before
        assert fitted.peak <= fitted.peak_before
        assert most == 1
        assert ahead > 2
        assert len(bounded.buckets) > len(free.buckets)


def test_the_peak_is_what_the_allocator_counts():
    [(bounded, *_, counted, _)] = simulate(1).run(scheduled)
    assert abs(counted - bounded.peak) <= 0.02 * bounded.peak


def test_buckets_are_small_only_where_they_are_in_the_way():
    for bounded, free, *_, roomy in on_two_ranks():
        counts = [len(one.buckets) for one in (bounded, *roomy, free)]
        assert counts == [10, 7, 5, 4]
        assert all(one.peak <= room for one, room in zip(roomy, ROOM, strict=True))
        assert {len(bucket) for bucket in roomy[0].buckets} == {1, 2}
