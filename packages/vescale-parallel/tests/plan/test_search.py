"""A search picks the fastest layout that fits, never slower than data parallelism, and says why."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vescale_parallel import Plan, PlanError, Zero
from vescale_parallel.cost import CLUSTERS, LLAMA3, Cost, Link
from vescale_parallel.train.model import Decoder, ModelConfig

SMALL = ModelConfig(vocab=1024, dim=256, layers=2, heads=4, kv_heads=2, hidden=512, context=64)


def on_meta(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


def test_what_fits_everywhere_is_data_parallel():
    said: list[str] = []
    plan = Plan.search(on_meta(SMALL), {"dp": 2, "tp": 2}, sequence=64, say=said.append)
    expected = Plan.data_parallel(on_meta(SMALL), {"dp": 2, "tp": 2})
    assert plan.with_(zero=0) == expected
    assert "data parallel, zero=0" in said[0]
    assert "tp + sequence parallel, zero=3" in said[0]
    assert f"chosen, as the fastest that fits: data parallel, zero={plan.zero.level}" in said[0]


def test_a_large_model_is_sharded_as_far_as_it_has_to_be():
    model, sizes = on_meta(LLAMA3["70B"]), {"dp": 16, "tp": 8}
    # A sequence for each dp rank: fewer than there are ranks, so that tp has to share them.
    given = {"batch": 16, "sequence": 8192, "recompute": True}
    plan = Plan.search(model, sizes, **given)
    assert plan.zero != Zero()
    assert plan.activations
    report = plan.check(model, sizes)
    assert report.bytes_per_rank < report.total_bytes / 8
    with pytest.raises(PlanError, match="no layout fits") as caught:
        Plan.search(model, sizes, memory=1e9, **given)
    assert "too large" in str(caught.value)
    assert "128 ranks share the batch" in str(caught.value)


@pytest.mark.parametrize("memory", [2e6, 4e6, 8e6, 80e9])
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 4}], ids=str)
def test_nothing_is_chosen_that_is_slower_than_data_parallel(sizes: dict[str, int], memory: float):
    model = on_meta(SMALL)
    try:
        plan = Plan.search(model, sizes, memory=memory, sequence=64)
    except PlanError:
        plan = Plan.data_parallel(model, sizes, zero=3)
        assert plan.check(model, sizes).cost(8 * 64, sequence=64).memory.total > memory
        return
    ranks = torch.Size(sizes.values()).numel()
    chosen, plain = (
        one.check(model, sizes).cost(
            ranks * 64,
            sequence=64,
            sequence_parallel=bool(one.activations),
            lookups="embed.weight",
            cluster=replace(CLUSTERS["h100"], memory=memory),
        )
        for one in (plan, Plan.data_parallel(model, sizes))
    )
    assert chosen.memory.total <= memory
    assert chosen.seconds <= plain.seconds or plain.memory.total > memory


def test_a_model_that_no_preset_knows_is_data_parallel():
    assert Plan.search(nn.Sequential(nn.Linear(3, 3)), {"tp": 4}).batch == "tp:0"


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 4),
    sizes=st.sampled_from([{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 4}, {"dp": 64, "tp": 8}]),
    batch=st.sampled_from([1, 8, 64, 1024]),
    sequence=st.sampled_from([16, 512, 8192]),
    memory=st.sampled_from([1e7, 1e8, 1e9, 80e9]),
    links=st.tuples(st.sampled_from([1e8, 1e10, 4e11]), st.sampled_from([1e-7, 1e-4])),
    recompute=st.booleans(),
)
def test_whatever_the_question_data_parallelism_is_not_faster(
    heads: int,
    layers: int,
    sizes: dict[str, int],
    batch: int,
    sequence: int,
    memory: float,
    links: tuple[float, float],
    recompute: bool,
):
    config = replace(SMALL, dim=64 * heads, heads=heads, kv_heads=1, layers=layers)
    model, link = on_meta(config), Link(bandwidth=links[0], latency=links[1])
    cluster = replace(CLUSTERS["h100"], memory=memory, inside=link, between=link)

    def cost(plan: Plan) -> Cost:
        return plan.check(model, sizes).cost(
            batch * sequence,
            sequence=sequence,
            cluster=cluster,
            recompute=recompute or None,
            sequence_parallel=bool(plan.activations),
            lookups="embed.weight",
        )

    plain = Plan.data_parallel(model, sizes)
    shared = batch >= torch.Size(sizes.values()).numel()
    kinds = [plain.with_(zero=level) for level in range(4)] if shared else []
    fitting = [one for plan in kinds if (one := cost(plan)).fits]
    question = {"batch": batch, "sequence": sequence, "recompute": recompute}
    try:
        chosen = cost(Plan.search(model, sizes, cluster=cluster, **question))
    except PlanError:
        assert not fitting
        return
    assert chosen.fits
    assert all(chosen.seconds <= one.seconds for one in fitting)
