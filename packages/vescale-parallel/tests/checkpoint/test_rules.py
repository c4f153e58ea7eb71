"""A plan's word about checkpointing is read, priced, stored, compared over ranks, or refused."""

import json
from typing import Any

import pytest
import torch
import vescale_comm
from vescale_parallel import DisagreementError, Plan, PlanError, Report, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import make


def report(kind: Any) -> Report:
    return Plan(checkpoint=kind).check(make(), {"dp": 2})


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        (None, []),
        ("none", []),
        ("full", ["blocks.0", "blocks.1", "blocks.2"]),
        (2, ["blocks.0", "blocks.2"]),
        ({"*": "full"}, ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]),
        ({"blocks.[12]": "full"}, ["blocks.1", "blocks.2"]),
        ({"blocks.0": "none", "blocks.*": "selective"}, ["blocks.1", "blocks.2"]),
        ({"*.mlp": "full", "*": "none"}, ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]),
    ],
)
def test_which_modules(kind: Any, modules: list[str]):
    assert [row.module for row in report(kind).regions] == modules


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("fulll", "Did you mean 'full'?"),
        (0, "got 0"),
        (True, "got True"),
        ({"blocks.*": 3}, "rule 'blocks.*': expected"),
        ("save: matmull", "Did you mean 'matmul'?"),
        ("save: aten::nothing", "no operator 'aten::nothing'"),
        ({"blocks.{*": "full"}, "never closed"),
        ({"bloks.*": "full"}, "matches no module"),
        ({"blocks": "full"}, "never applies"),
        ({"*.mlp": "full", "blocks.?": "full"}, "rule '*.mlp' never applies"),
    ],
)
def test_what_cannot_be_read_or_never_applies(kind: Any, message: str):
    with pytest.raises(PlanError) as caught:
        report(kind)
    assert message in str(caught.value)


def test_a_model_without_repeated_blocks_is_told():
    with pytest.raises(PlanError, match="no repeated blocks"):
        Plan(checkpoint="full").check(torch.nn.Linear(2, 2), {"dp": 2})


@pytest.mark.parametrize("kind", [None, "full", 3, "24GB", {"blocks.*": "save: bmm", "*": "none"}])
def test_it_is_stored_and_edited(kind: Any):
    plan = Plan(checkpoint=kind)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_toml(plan.to_toml()) == plan
    assert (Plan() | plan).checkpoint == kind
    assert Plan().with_(checkpoint=kind) == plan
    assert plan == Plan.data_parallel(make(), {"dp": 2}, checkpoint=kind, axes=plan.axes)


def test_estimates_order_the_kinds_and_a_budget_decides_by_tokens():
    kinds: dict[Any, float] = {}
    for kind in (None, "selective", 2, "full"):
        kinds[kind] = report(kind).cost(1024).memory.activations
    assert kinds["full"] < kinds[2] < kinds[None]
    assert kinds["full"] < kinds["selective"] < kinds[None]
    assert report(None).cost(1024, recompute=True).memory == report("full").cost(1024).memory
    estimate = report("64KB").activations
    tokens = [n for n in range(0, 2000, 10)]
    needed = [estimate.needed(n) for n in tokens]
    assert needed == sorted(needed)
    assert {0, 3} <= set(needed)
    for n, number in zip(tokens, needed, strict=True):
        fits = estimate.bytes_of(n, estimate.regions[:number]) <= 64e3
        assert fits or number == 3
        if number > 0 and fits:
            assert estimate.bytes_of(n, estimate.regions[: number - 1]) > 64e3


def test_the_table_tells_what_a_token_leaves_behind():
    text = str(report("64KB"))
    assert "repeated blocks" in text
    assert "B a token of a rank" in text
    assert "nothing is recomputed up to" in text
    assert "a token" not in str(report(None))
    found = json.loads(Plan(checkpoint=2).explain(make(), {"dp": 2}, form="json"))
    assert [row["module"] for row in found["recomputed"]] == ["blocks.0", "blocks.2"]
    assert found["activation_bytes_a_token"]["kept"] < found["activation_bytes_a_token"]["without"]


def test_ranks_with_other_words_are_told():
    def on_a_rank(rank: int, world_size: int) -> None:
        plan = Plan(checkpoint="full" if rank else "selective")
        mesh = make_mesh(device_type="cpu", dp=2)
        with pytest.raises(DisagreementError, match="plan 'checkpoint'"):
            parallelize(make(), mesh, plan)

    vescale_comm.simulate(2)(on_a_rank)
