"""A plan's word about checkpointing is read, priced, stored, compared over ranks, or refused.

torch's `save_on_cpu` around eager steps: what autograd saves is copied, and the bits stay.

The device of these tests is the host, where `save_on_cpu` copies nothing. So hooks of the same kind
that do copy stand beside it.
"""

import json
from math import prod
from typing import Any

import pytest
import torch
import vescale_comm
from offload_runs import backward
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import DisagreementError, Plan, PlanError, Report, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import distributed, gradients, make


def report(kind: Any) -> Report:
    return Plan(checkpoint=kind).check(make(), {"dp": 2})


KINDS = [
    (None, []),
    ("none", []),
    ("full", ["blocks.0", "blocks.1", "blocks.2"]),
    (2, ["blocks.0", "blocks.2"]),
    ({"*": "full"}, ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]),
    ({"blocks.[12]": "full"}, ["blocks.1", "blocks.2"]),
    ({"blocks.0": "none", "blocks.*": "selective"}, ["blocks.1", "blocks.2"]),
    ({"*.mlp": "full", "*": "none"}, ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]),
]


@pytest.mark.parametrize(("kind", "modules"), KINDS)
def test_which_modules(kind: Any, modules: list[str]):
    assert [row.module for row in report(kind).regions] == modules


UNREADABLE = [
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
]


@pytest.mark.parametrize(("kind", "message"), UNREADABLE)
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


class Copied(saved_tensors_hooks):
    """Copies what is saved, as `save_on_cpu` does on a device, and counts it."""

    def __init__(self) -> None:
        self.bytes = 0

        def pack(tensor: Tensor) -> Tensor:
            # Local tensors come here; a wrapper only where a checkpoint keeps its arguments.
            if not isinstance(tensor, DTensor):
                self.bytes += tensor.nbytes
            return tensor.detach().clone()

        super().__init__(pack, lambda copy: copy)


BITS = [
    ({"dp": 2, "tp": 2}, {"zero": 0}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 2}, {"zero": 3, "checkpoint": "full"}),
    ({"dp": 2}, {"zero": 2, "checkpoint": "selective"}),
]


@pytest.mark.parametrize(("sizes", "words"), BITS)
def test_the_bits_stay(sizes: dict[str, int], words: dict[str, Any]):
    def run(rank: int, world_size: int) -> None:
        found: list[dict[str, Tensor | None]] = []
        copied = Copied()
        for around in (None, save_on_cpu(), copied):
            model = distributed(make(), sizes, **words)
            if around is None:
                backward(model, 0)
            else:
                with around:
                    backward(model, 0)
            found.append(gradients(model))
        assert copied.bytes > 0
        for name, expected in found[0].items():
            assert expected is not None
            assert all(torch.equal(one[name], expected) for one in found[1:])

    simulate(prod(sizes.values()))(run)
