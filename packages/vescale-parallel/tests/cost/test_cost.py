"""The cost of a step is exact in bytes, elements and flops where a few lines of arithmetic are.

A plan with stages costs what its stages hold and do, by its schedule; microbatches are turns.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vescale_parallel import Invariant, MoE, Pipeline, Plan, PlanError, Zero
from vescale_parallel.cost import (
    CLUSTERS,
    LLAMA3,
    Cluster,
    Cost,
    Link,
    Precision,
    collective_seconds,
    llama3,
    main,
)
from vescale_parallel.schedules import SCHEDULES, simulate_schedule

TOKENS = 64
FLOAT32 = Precision(compute=4)
PLAN = Plan(parameters={"*.up.weight": "tp:0", "*.down.weight": "tp:1", "*": "replicate"})


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(8), nn.Linear(8, 32, bias=False)
        self.down = nn.Linear(32, 8, bias=False)


class Model(nn.Module):
    """Two blocks between an embedding and a head, of 8 channels."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight


BLOCK, TABLE = 2 * 8 * 32 + 8, 16 * 8
WHOLE = 2 * BLOCK + 2 * TABLE


def cost_of(mesh, model=None, tokens=TOKENS, precision=FLOAT32, **options):
    with torch.device("meta"):
        model = model or Model()
    return PLAN.check(model, mesh).cost(tokens, precision=precision, **options)


def sent(cost, axis):
    return sum(size for one, size, _ in cost.transfers if one.axis == axis)


@pytest.mark.parametrize(
    ("zero", "sharded"), [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))]
)
def test_each_level_shards_one_kind_more(zero, sharded):
    memory = cost_of({"dp": 4, "tp": 1}, zero=zero).memory
    found = (memory.parameters, memory.gradients, memory.states)
    assert found == tuple(
        size * WHOLE / parts for size, parts in zip((4, 4, 8), sharded, strict=True)
    )
    # The root and both blocks: what computes, and what is gathered ahead.
    assert memory.gathered == (4 * WHOLE if zero == 3 else 0)
    assert memory.total == sum(vars(memory).values())


@pytest.mark.parametrize(("behind", "units"), [(0, 1), (1, 2), (5, 2)])
def test_gradients_on_their_way_are_counted(behind, units):
    # Of each unit what is packed and what arrives; the root is the smallest of them.
    root, arrived = 2 * TABLE, BLOCK + 2 * TABLE
    sizes = {"dp": 4, "tp": 1}
    for zero, shard in ((1, WHOLE / 4), (2, 0), (3, 0)):
        memory = cost_of(sizes, zero=zero, reduce_ahead=behind).memory
        sent = units * BLOCK + (root if behind > 1 else 0)
        assert memory.reduced == 4 * (2 * sent + arrived + shard)
    # Nobody says how many: small ones all are.
    assert cost_of(sizes, zero=2).memory.reduced == 4 * (2 * WHOLE + arrived)
    # A bucket, and sums beside gradients.
    assert cost_of(sizes).memory.reduced == 4 * 2 * WHOLE


def test_tensor_parallel_ranks_hold_their_part_of_the_matrices():
    assert cost_of({"dp": 1, "tp": 2}).memory.parameters == 4 * (WHOLE - 2 * 8 * 32)


@pytest.mark.parametrize(("zero", "passes"), [(0, 2), (1, 2), (2, 2), (3, 2 + BLOCK / WHOLE)])
def test_bytes_over_dp_are_those_of_rings(zero, passes):
    # ZeRO-3 gathers all once and all blocks but the last again, and reduces once; the others do one
    # of each.
    cost = cost_of({"dp": 4, "tp": 1}, zero=zero)
    assert sent(cost, "dp") == pytest.approx(passes * 4 * WHOLE * 3 / 4)
    assert sent(cost, "tp") == 0


def test_bytes_over_tp_are_two_sums_of_activations_a_block():
    cost = cost_of({"dp": 2, "tp": 4})
    half = TOKENS // 2 * 8 * 4
    assert sent(cost, "tp") == 2 * 2 * (2 * half * 3 / 4)
    again = cost_of({"dp": 2, "tp": 4}, recompute=True)
    assert sent(again, "tp") == 2 * 3 * (2 * half * 3 / 4)


def test_flops_are_six_for_each_multiplied_element_and_token():
    flops = cost_of({"dp": 1, "tp": 1}).flops
    assert flops == 6 * TOKENS * (2 * 2 * 8 * 32 + TABLE)
    assert cost_of({"dp": 4, "tp": 1}).flops == flops / 4
    # What is recomputed is no work of the model, but takes its time.
    again = cost_of({"dp": 1, "tp": 1}, recompute=True)
    assert again.flops == flops
    assert again.compute > cost_of({"dp": 1, "tp": 1}).compute
    # A region that is all there is keeps its input as well, and saves nothing.
    alone = nn.Module()
    alone.blocks = nn.ModuleList([nn.Linear(8, 8, bias=False)])
    products = 8 * 8 * TOKENS * 8 / (CLUSTERS["h100"].flops * CLUSTERS["h100"].efficiency)
    again = Plan().check(alone, {"dp": 1}).cost(TOKENS, precision=FLOAT32, recompute=True)
    assert again.compute == pytest.approx(products)


def test_tied_weights_are_held_once_and_multiplied_all_the_same():
    with torch.device("meta"):
        tied = Model(tied=True)
    apart, cost = cost_of({"dp": 1}), cost_of({"dp": 1}, model=tied)
    assert cost.memory.parameters == apart.memory.parameters - 4 * TABLE
    assert cost.flops == apart.flops
    assert cost.memory.activations == apart.memory.activations


# Parameters of the published models, heads and embeddings untied.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)],
)
def test_llama_has_its_published_number_of_parameters(name, parameters):
    report = llama3(name, dp=8, tp=8)
    assert report.total_bytes == 4 * parameters
    sequence = 8192
    cost = report.cost(8 * sequence, sequence=sequence, zero=3)
    # Attention: twice 2 flops for each pair, forward and twice backward, half of them masked.
    config = LLAMA3[name]
    attention = 6 * config.layers * config.dim * sequence
    matrices = 6 * (parameters - config.vocab * config.dim)
    norms = 6 * (2 * config.layers + 1) * config.dim
    tokens = 8 * sequence
    assert cost.flops * 64 == pytest.approx(tokens * (matrices + attention - norms), rel=1e-9)


@settings(deadline=None)  # time is no property of it, and machines are busy
@given(st.integers(1, 14), st.sampled_from([1, 2, 4, 8]), st.integers(0, 3))
def test_more_ranks_never_need_more_memory_nor_do_more_each(doublings, tp, zero):
    small, large = (
        cost_of({"dp": 2 ** (doublings + more), "tp": tp}, zero=zero, tokens=2**16)
        for more in (0, 1)
    )
    assert large.memory.total <= small.memory.total
    assert large.flops <= small.flops
    assert all(math.isfinite(one) and one >= 0 for one in (large.seconds, large.utilization))


def test_a_higher_level_never_holds_more_between_steps():
    held = []
    for zero in range(4):
        memory = cost_of({"dp": 8, "tp": 2}, zero=zero).memory
        held.append(memory.parameters + memory.gradients + memory.states)
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 4


def test_a_collective_costs_its_steps_and_its_bytes():
    ring = Link(latency=1.0, bandwidth=10.0, logarithmic=False)
    assert collective_seconds("all_gather", 40, 4, ring) == 3 * 1.0 + 30 / 10
    assert collective_seconds("all_reduce", 40, 4, ring) == 2 * (3 * 1.0 + 30 / 10)
    tree = Link(latency=1.0, bandwidth=10.0)
    assert collective_seconds("all_gather", 40, 4, tree) == 2 * 1.0 + 30 / 10
    assert collective_seconds("all_reduce", 40, 1, tree) == 0


def test_a_group_within_a_node_uses_its_links_and_others_share_network_cards():
    cluster = CLUSTERS["h100"]
    assert cluster.link(stride=1, members=8) == cluster.inside
    # Every 8th rank: one of each node.
    assert cluster.link(stride=8, members=4).bandwidth == cluster.between.bandwidth
    # All ranks of two nodes: eight cards, as fast as the link inside allows.
    wide = cluster.link(stride=1, members=16)
    assert wide.bandwidth == min(8 * cluster.between.bandwidth, cluster.inside.bandwidth)


def test_overlap_hides_gathers_up_to_the_first():
    slow = CLUSTERS["h100"]
    mesh = {"dp": 8, "tp": 1}
    none, all_of_it = (
        cost_of(mesh, zero=3, tokens=2**24, cluster=_with_overlap(slow, overlap))
        for overlap in (0.0, 1.0)
    )
    assert none.exposed == pytest.approx(none.seconds_over("dp"))
    assert 0 < all_of_it.exposed < none.exposed


def _with_overlap(cluster: Cluster, overlap: float) -> Cluster:
    return Cluster(**{**vars(cluster), "overlap": overlap})


def test_the_cost_of_a_plan_is_that_of_its_own_axis():
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))

    def memory(axis):
        rules = {"*": "replicate"}
        plan = Plan(batch=f"{axis}:0", zero=Zero(3, over=axis), axes=(axis,), parameters=rules)
        return plan.check(model, {axis: 4}).cost(1024).memory

    assert memory("shard") == memory("dp")
    plan = Plan(batch="dp:0", parameters={"*": "replicate"})
    assert plan.check(model, {"dp": 4}).cost(1024, zero=3).memory == memory("dp")
    assert plan.check(model, {"dp": 4}).cost(1024).memory.total > memory("dp").total


def test_a_wrong_cluster_is_named():
    with pytest.raises(PlanError, match=r"no cluster 'h10'\. Did you mean 'h100'"):
        cost_of({"dp": 2}, cluster="h10")


def test_the_program_prints_a_row_for_each_mesh(capsys):
    assert main(["--model", "8B", "--ranks", "8", "16384", "--zero", "0", "3", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("8B ") and "zero=" not in line]
    assert len(rows) == 4
    assert any("all_gather" in line for line in lines)
    for sizes in (["8", "--tp", "3"], ["16", "--tp", "16"]):
        assert main(["--model", "8B", "--ranks", *sizes]) == 2
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0


# Nothing is ever waited for but other stages.
FAST = CLUSTERS["h100"]
FREE = Link(latency=0.0, bandwidth=1e30)


def stack(blocks: int = 8) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(blocks)))


def cost_in_stages(sizes: dict[str, int], tokens: int = 4096, **words: Any) -> Cost:
    said = {name: words.pop(name) for name in ("recompute",) if name in words}
    cluster = replace(FAST, inside=FREE, between=FREE)
    report = Plan(**words).check(stack(), sizes)
    return report.cost(tokens, precision=FLOAT32, cluster=cluster, **said)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_equal_stages_take_what_their_schedule_takes(name: str):
    whole = cost_in_stages({"dp": 1})
    found = cost_in_stages({"pp": 4}, pipeline=name, microbatches=8)
    split = Plan(pipeline=name, microbatches=8).check(stack(), {"pp": 4}).split
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
        found = cost_in_stages({"pp": 2, "dp": 2}, pipeline=name, microbatches=4)
        assert 0 < found.bubble < 1, name
        kinds = {(one.axis, one.kind) for one, _, _ in found.transfers}
        assert kinds == {("pp", "send"), ("dp", "all_reduce")}, name


def test_messages_are_as_wide_as_blocks_and_are_waited_for_where_links_are_slow():
    words: Any = {"pipeline": "1f1b", "microbatches": 4}
    slow = CLUSTERS["h100"]
    report = Plan(**words).check(stack(), {"pp": 2, "dp": 2})
    found = report.cost(4096, precision=FLOAT32, cluster=slow)
    ((send, sent, seconds),) = (one for one in found.transfers if one[0].axis == "pp")
    assert send.size == 4096 / 2 / 4 * 64 * 4
    # Of 4 microbatches an activation one way and its gradient the other, over two ranks.
    assert (send.count, sent) == (4, 4 * send.size)
    assert seconds > 0
    assert found.exposed > cost_in_stages({"pp": 2, "dp": 2}, **words).exposed


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_microbatches_are_turns(zero: int):
    sizes = {"dp": 4}
    one, four = (cost_in_stages(sizes, zero=zero, microbatches=n) for n in (1, 4))
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
    words = {"deterministic": Invariant(8)}
    plain, found = cost_in_stages({"dp": 2}), cost_in_stages({"dp": 2}, **words)
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
    plan = Plan(pipeline=Pipeline("gpipe", stages="blocks.*"), microbatches=1)
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
