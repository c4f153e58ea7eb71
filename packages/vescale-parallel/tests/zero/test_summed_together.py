"""Gradients of small units are reduced by one collective, with the bits of those by themselves.

Left open (`reduce_ahead="auto"`), beside a plan that says of how many units they are under way.
"""

from typing import Any

import pytest
import torch
from torch import nn
from vescale_comm import simulate, trace
from vescale_comm.testing import run
from vescale_parallel import captured_units, no_sync, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._zero import joint_gathers
from zero_models import batch, distributed, make, plan_for, schedule_of, train_alike

DP, BLOCKS = {"dp": 4}, 3


def backward(model: nn.Module, seed: int) -> int:
    """How many reductions a step sends."""
    torch.manual_seed(seed)
    with trace() as seen:
        model(*batch(seed)).backward()
    return sum(one.op == "reduce_scatter" and one.axes == ("dp",) for one in seen.records)


def trained(rank: int, world_size: int, zero: Any, words: dict[str, Any], sent: int) -> None:
    models = [distributed(make(), DP, zero, reduce_ahead=n, **words) for n in (BLOCKS, "auto")]

    def step(model: nn.Module, seed: int) -> int:
        found = backward(model, seed)
        with no_sync(model):
            assert backward(model, seed + 10) == 0
        return found

    for seed, found in enumerate(train_alike(models, step)):
        # In the first backward nobody knows what comes next.
        assert found == [BLOCKS + 1, sent if seed else BLOCKS + 1]


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (3, {}),
        (2, {}),
        (1, {}),
        (3, {"precision": {"compute": "bfloat16", "reduce": "float32"}}),
        (3, {"precision": {"compute": "bfloat16", "reduce": "bfloat16"}}),
    ],
    ids=str,
)
def test_the_bits_of_one_by_one(zero: int, words: dict[str, Any]):
    simulate(4)(trained, zero, words, 1)


def test_no_more_than_the_bound_are_reduced_together(monkeypatch: pytest.MonkeyPatch):
    root, block, *_ = [one.packed_bytes for one in plan_for(DP).check(make(), DP).buffers]
    # Two blocks, then the third with the root, which takes less than a block.
    monkeypatch.setattr(joint_gathers, "TOGETHER_BYTES", 2 * block)
    assert root <= block
    simulate(4)(trained, 3, {"prefetch": 1}, 2)
    # No two of them: as by themselves.
    monkeypatch.setattr(joint_gathers, "TOGETHER_BYTES", block)
    simulate(4)(trained, 3, {"prefetch": 1}, BLOCKS + 1)


def asked(rank: int, world_size: int, behind: int) -> None:
    """Totals are asked for while further units come: of few units gradients are on their way."""
    models = [distributed(make(), DP, 3, reduce_ahead=n) for n in (behind, "auto")]
    schedule_of(models[1]).reduce_ahead = behind  # as beside a unit that is as large as all may be

    def step(model: nn.Module, seed: int) -> None:
        with no_sync(model):
            backward(model, seed + 10)
        backward(model, seed)

    train_alike(models, step)


@pytest.mark.parametrize("behind", [1, 2])
def test_what_was_asked_for_takes_nothing_along(behind: int):
    simulate(4)(asked, behind)


def unlike(rank: int, world_size: int) -> None:
    """Frozen units, and units that a step does not reach, have nothing to send."""
    models = [distributed(make(), DP, 3, reduce_ahead=n) for n in (BLOCKS, "auto")]
    kinds = [(1, None), (0, None), (2, 1), (None, 2), (None, 0)]

    def step(model: nn.Module, seed: int) -> None:
        frozen, skipped = kinds[seed]
        for number, one in enumerate(model.blocks):
            one.requires_grad_(number != frozen)
        if skipped is not None:
            # A forward that leaves out a block that ran in the one before.
            model.blocks[skipped].forward = lambda x: x
        backward(model, seed)
        for one in model.blocks:
            one.__dict__.pop("forward", None)

    train_alike(models, step, len(kinds))


def test_units_without_gradients():
    simulate(4)(unlike)


def static(rank: int, world_size: int) -> None:
    mesh = make_mesh(device_type="cpu", **DP)
    models = [
        parallelize(make(), mesh, plan_for(DP, 3, reduce_ahead=n), static=n == "auto")
        for n in (BLOCKS, "auto")
    ]

    def step(model: nn.Module, seed: int) -> int:
        sent = backward(model, seed)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return sent

    assert [sent for _, sent in train_alike(models, step)] == [BLOCKS + 1, 1, 1, 1]
    assert any(one.programs for one in captured_units(models[1]))


def test_over_gloo_with_captured_units():
    run(static, 4)
