"""A plan with stages costs what its stages hold and do, by its schedule; microbatches are turns."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from vescale_parallel import MoE, Plan
from vescale_parallel.cost import CLUSTERS, Cost, Link, Precision
from vescale_parallel.schedules import SCHEDULES, simulate_schedule

FLOAT32 = Precision(compute=4)
# Nothing is ever waited for but other stages.
FAST = CLUSTERS["h100"]
FREE = Link(latency=0.0, bandwidth=1e30)


def stack(blocks: int = 8) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(blocks)))


def cost_of(sizes: dict[str, int], tokens: int = 4096, **words: Any) -> Cost:
    said = {name: words.pop(name) for name in ("recompute",) if name in words}
    cluster = replace(FAST, inside=FREE, between=FREE)
    report = Plan(**words).check(stack(), sizes)
    return report.cost(tokens, precision=FLOAT32, cluster=cluster, **said)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_equal_stages_take_what_their_schedule_takes(name: str):
    whole = cost_of({"dp": 1})
    found = cost_of({"pp": 4}, pipeline={"schedule": name, "microbatches": 8})
    pipeline = {"schedule": name, "microbatches": 8}
    split = Plan(pipeline=pipeline).check(stack(), {"pp": 4}).split
    assert split is not None
    paper = simulate_schedule(split.schedule)
    assert found.bubble == pytest.approx(paper.bubble)
    assert found.compute == pytest.approx(whole.compute / 4)
    assert found.seconds - found.update == pytest.approx(found.compute / (1 - paper.bubble))
    assert found.memory.parameters == whole.memory.parameters / 4
    # A stage keeps 1/8 of the model of each microbatch that is under way, or half of that.
    per_stage = whole.memory.activations / 8 / len(split.schedule.stage_ranks)
    assert found.memory.activations == pytest.approx(paper.peak * per_stage)
    assert found.flops == pytest.approx(whole.flops / 4)


def test_every_schedule_has_a_price():
    for name in SCHEDULES:
        found = cost_of({"pp": 2, "dp": 2}, pipeline={"schedule": name, "microbatches": 4})
        assert 0 < found.bubble < 1, name
        kinds = {(one.axis, one.kind) for one, _, _ in found.transfers}
        assert kinds == {("pp", "send"), ("dp", "all_reduce")}, name


def test_messages_are_as_wide_as_blocks_and_are_waited_for_where_links_are_slow():
    pipeline = {"schedule": "1f1b", "microbatches": 4}
    slow = CLUSTERS["h100"]
    report = Plan(pipeline=pipeline).check(stack(), {"pp": 2, "dp": 2})
    found = report.cost(4096, precision=FLOAT32, cluster=slow)
    ((send, sent, seconds),) = (one for one in found.transfers if one[0].axis == "pp")
    assert send.size == 4096 / 2 / 4 * 64 * 4
    # Of 4 microbatches an activation one way and its gradient the other, over two ranks.
    assert (send.count, sent) == (4, 4 * send.size)
    assert seconds > 0
    assert found.exposed > cost_of({"pp": 2, "dp": 2}, pipeline=pipeline).exposed


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_microbatches_are_turns(zero: int):
    sizes = {"dp": 4}
    one, four = (cost_of(sizes, zero=zero, microbatches=n) for n in (1, 4))
    assert four.memory.activations == one.memory.activations / 4
    assert four.compute == pytest.approx(one.compute)
    assert four.memory.states == one.memory.states
    # They are added up whole, and reduced once.
    assert four.memory.gradients == one.memory.parameters * (1 if zero < 3 else 4)
    reduced = [
        sum(sent for t, sent, _ in cost.transfers if t.kind in ("reduce_scatter", "all_reduce"))
        for cost in (one, four)
    ]
    assert reduced[0] == reduced[1] > 0
    gathered = [
        sum(sent for t, sent, _ in cost.transfers if t.kind == "all_gather") for cost in (one, four)
    ]
    # Each turn gathers; what the update has written is gathered once.
    assert gathered[1] == gathered[0] * (4 if zero == 3 else 1)


def test_logical_shards_are_turns():
    words = {"deterministic": "dp-invariant", "shards": 8}
    plain, found = cost_of({"dp": 2}), cost_of({"dp": 2}, **words)
    assert found.memory.activations == plain.memory.activations / 4


def test_what_is_tied_over_stages_is_on_each_and_computed_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(128, 64)
            self.blocks = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
            self.head = nn.Linear(64, 128, bias=False)
            self.head.weight = self.embed.weight

    with torch.device("meta"):
        model = Tied()
    plan = Plan(pipeline={"schedule": "gpipe", "microbatches": 1, "stages": "blocks.*"})
    found = plan.check(model, {"pp": 2}).cost(32, precision=FLOAT32)
    whole = Plan().check(model, {"dp": 1}).cost(32, precision=FLOAT32)
    assert found.flops * 2 == pytest.approx(whole.flops)
    assert found.memory.parameters == 4 * (128 * 64 + 64 * 64)


def test_what_is_not_counted_is_told():
    with torch.device("meta"):
        experts = MoE(8, 8, experts=4, top_k=2)
    assert Plan().check(experts, {"dp": 2}).unpriced == ()
    (told,) = Plan(batch="ep:0", experts="ep").check(experts, {"ep": 2}).unpriced
    assert "experts" in told
    (told,) = Plan(batch="dp:0, cp:1").check(stack(), {"cp": 2}).unpriced
    assert "attention" in told
