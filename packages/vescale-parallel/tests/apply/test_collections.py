"""Steps send the same whenever Python collects garbage, which is chance on each rank.

Optimizers of a model are found in one order on all ranks, whatever their garbage collectors did.

`balance_experts` redistributes what they remember, one after another: each is a collective.
"""

import gc
import random
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from vescale_comm import trace
from vescale_comm.testing import run
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._apply.optimizers import optimizers_of

PLANS = {
    "dp": ({"dp": 2}, {"batch": "dp:0"}),
    "zero": ({"dp": 2}, {"batch": "dp:0", "zero": 3}),
    "recomputed": ({"dp": 2}, {"batch": "dp:0", "zero": 2, "checkpoint": "full"}),
    "microbatches": ({"dp": 2}, {"batch": "dp:0", "zero": 1, "microbatches": 2}),
    "tp": ({"tp": 2}, {"parameters": {"*.0.weight": "tp:0", "*": "replicate"}}),
    "stages": ({"pp": 2}, {"pipeline": "1f1b", "microbatches": 2}),
}


@contextmanager
def collections_at_random(rank, seed, share=0.0005):
    """Rank 0 collects garbage at random calls, rank 1 never."""
    chance = random.Random(seed)

    def called(frame, event, argument):
        if event == "call" and chance.random() < share:
            gc.collect()

    gc.collect()
    before = sys.getprofile()
    try:
        if rank:
            gc.disable()
        else:
            sys.setprofile(called)
        yield
    finally:
        sys.setprofile(before)
        gc.enable()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def trained(mesh, options):
    """Train two models; nobody keeps the first, but for its gradients and its optimizer."""
    kept, losses = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Model()
        parallelize(model, mesh, Plan(**options))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(float(forward_backward(model, torch.randn(8, 4))))
            if "pp" not in mesh.mesh_dim_names:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        model.itself = model
        kept.append(optimizer)
        kept += [one.grad for one in model.parameters() if one.grad is not None and one.numel()]
        del model, optimizer
    for one in kept:
        if isinstance(one, torch.optim.Optimizer):
            one.step()
        elif hasattr(one, "full_tensor"):
            losses.append(float((one * one).sum()))
    return losses


def run_alike(rank, world, name):
    sizes, options = PLANS[name]
    mesh = make_mesh(device_type="cpu", **sizes)
    with trace() as sent, collections_at_random(rank, 0):
        losses = trained(mesh, options)
    told = [(one.op, one.ranks) for one in sent.records if one.op not in ("send", "recv")]
    return losses, [str(one) for one in told]


@pytest.mark.parametrize("name", PLANS)
def test_what_is_sent_is_no_chance(name):
    (first, sent), (second, other) = run(run_alike, 2, name, timeout=60)
    assert first == second
    assert sent == other


def test_the_order_is_that_of_the_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    later = torch.optim.SGD(model[2].parameters(), lr=0.1)
    # It is older to the collector now than what comes.
    gc.collect()
    gc.disable()
    try:
        first = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
        other = torch.optim.Adam(model[1].parameters())
        young = optimizers_of(model)
    finally:
        gc.enable()
    gc.collect()
    for found in (young, optimizers_of(model)):
        assert [id(one) for one in found] == [id(one) for one in (other, first, later)]


def test_objects_are_looked_through_once(monkeypatch):
    looks = []

    def noting(*kinds):
        looks.append(kinds)
        return referrers(*kinds)

    referrers = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", noting)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    # Nothing but modules holds these.
    assert optimizers_of(model) == []
    assert not looks
    kept = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    model(torch.ones(1, 2)).sum().backward()
    for one in kept:
        one.step()
    # One that lives on in a cycle alone.
    kept[1].cycle = kept[1]
    del one
    kept.pop()
    assert [id(one) for one in optimizers_of(model)] == [id(one) for one in kept]
    assert len(looks) == 1
