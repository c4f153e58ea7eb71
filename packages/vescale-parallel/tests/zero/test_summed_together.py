"""Gradients of small units are reduced by one collective, with the bits of those by themselves.

Left open (`behind="auto"`), beside a plan that says of how many units gradients are under way.
"""

from typing import Any

import pytest
import torch
from torch import nn
from vescale_comm import simulate, trace
from vescale_comm.testing import run
from vescale_dtensor import DTensor
from vescale_parallel import captured_units, no_sync, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._zero import together
from zero_models import Decoder, adamw, batch, distributed, make, plan_for, schedule_of

DP, BLOCKS = {"dp": 4}, 3


def backward(model: nn.Module, seed: int) -> int:
    """How many reductions a step sends."""
    torch.manual_seed(seed)
    with trace() as seen:
        model(*batch(seed)).backward()
    return sum(one.op == "reduce_scatter" and one.axes == ("dp",) for one in seen.records)


def require_alike(models: list[Any]) -> None:
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert (one.grad is None) == (two.grad is None)
        for first, second in (
            [(one, two)] if one.grad is None else [(one, two), (one.grad, two.grad)]
        ):
            held = [t.to_local() if isinstance(t, DTensor) else t for t in (first, second)]
            assert torch.equal(*held)


def trained(rank: int, world_size: int, zero: Any, words: dict[str, Any], sent: int) -> None:
    models = [distributed(make(), DP, zero, behind=n, **words) for n in (BLOCKS, "auto")]
    optimizers = [adamw(one.parameters()) for one in models]
    for seed in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = [backward(model, seed) for model in models]
        # In the first backward nobody knows what comes next.
        assert found == [BLOCKS + 1, sent if seed else BLOCKS + 1]
        for model in models:
            with no_sync(model):
                assert backward(model, seed + 10) == 0
        require_alike(models)
        for optimizer in optimizers:
            optimizer.step()
    require_alike(models)


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
    monkeypatch.setattr(together, "TOGETHER_BYTES", 2 * block)
    assert root <= block
    simulate(4)(trained, 3, {"prefetch": 1}, 2)
    # No two of them: as by themselves.
    monkeypatch.setattr(together, "TOGETHER_BYTES", block)
    simulate(4)(trained, 3, {"prefetch": 1}, BLOCKS + 1)


def asked(rank: int, world_size: int, behind: int) -> None:
    """Totals are asked for while further units come: of few units gradients are on their way."""
    models = [distributed(make(), DP, 3, behind=n) for n in (behind, "auto")]
    schedule_of(models[1]).behind = behind  # as beside a unit that is as large as all may be
    optimizers = [adamw(one.parameters()) for one in models]
    for seed in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in models:
            with no_sync(model):
                backward(model, seed + 10)
            backward(model, seed)
        require_alike(models)
        for optimizer in optimizers:
            optimizer.step()
    require_alike(models)


@pytest.mark.parametrize("behind", [1, 2])
def test_what_was_asked_for_takes_nothing_along(behind: int):
    simulate(4)(asked, behind)


def unlike(rank: int, world_size: int) -> None:
    """Frozen units, and units that a step does not reach, have nothing to send."""
    models = [distributed(make(), DP, 3, behind=n) for n in (BLOCKS, "auto")]
    optimizers = [adamw(one.parameters()) for one in models]
    for seed, (frozen, skipped) in enumerate([(1, None), (0, None), (2, 1), (None, 2), (None, 0)]):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for number, one in enumerate(model.blocks):
                one.requires_grad_(number != frozen)
            kept = list(model.blocks)
            if skipped is not None:
                # A forward that leaves out a block that ran in the one before.
                model.blocks[skipped].forward = lambda x: x
            backward(model, seed)
            for one in kept:
                one.__dict__.pop("forward", None)
        require_alike(models)
        for optimizer in optimizers:
            optimizer.step()
    require_alike(models)


def test_units_without_gradients():
    simulate(4)(unlike)


def raised(rank: int, world_size: int) -> None:
    """What waits when a backward raises is not sent by the next one."""

    class Refused(RuntimeError):
        pass

    def refuse(gradient: Any) -> None:
        raise Refused

    models = [distributed(make(), DP, 3, behind=n) for n in (BLOCKS, "auto")]
    for seed in range(3):
        for number, model in enumerate(models):
            model.zero_grad()
            handle = model.blocks[0].norm.register_forward_hook(
                lambda *a: a[2].register_hook(refuse) and None
            )
            torch.manual_seed(seed)
            with trace() as seen:
                loss = model(*batch(seed))
                handle.remove()
                with pytest.raises(Refused):
                    loss.backward()
            sent = sum(one.op == "reduce_scatter" for one in seen.records)
            assert sent == (0 if number and seed else 2)
            model.zero_grad()
            backward(model, seed)
        require_alike(models)


def test_what_waits_when_a_backward_raises_is_dropped():
    simulate(4)(raised)


def static(rank: int, world_size: int) -> None:
    mesh = make_mesh(device_type="cpu", **DP)
    models = [
        parallelize(make(), mesh, plan_for(DP, 3, behind=n), static=n == "auto")
        for n in (BLOCKS, "auto")
    ]
    optimizers = [adamw(one.parameters()) for one in models]
    for seed in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            sent = backward(model, seed)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert sent == (1 if seed else BLOCKS + 1)
        require_alike(models)
    assert any(one.programs for one in captured_units(models[1]))


def test_over_gloo_with_captured_units():
    run(static, 4)


def held(rank: int, world_size: int) -> None:
    """Packed gradients are held once while they wait, and nothing of them afterwards."""
    model = distributed(Decoder(blocks=4), DP, 3)
    for seed in range(3):
        model.zero_grad()
        backward(model, seed)
    sums = schedule_of(model).sums
    assert sums is not None
    assert not sums._waiting
    for unit in schedule_of(model).units:
        for buffer in unit.buffers:
            assert not buffer._under_way
            assert buffer.unreduced is None


def test_nothing_is_left():
    simulate(4)(held)
