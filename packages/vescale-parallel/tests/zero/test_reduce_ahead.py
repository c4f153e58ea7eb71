"""With `reduce_ahead=n` gradients of n units are reduced while others compute, with the same bits.

Left open, as many units are as cost no memory that matters.

Trained beside the same plan without it, and with it the numbers of reductions under way, between
their start and their end, are counted.
"""

import copy
import json
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from vescale_comm import simulate, trace
from vescale_parallel import no_sync
from vescale_parallel._plan.report_json import report_json
from vescale_parallel._zero.flat_buffer import FlatBuffer
from vescale_parallel._zero.reduce_ahead import ReduceAhead, reduce_ahead_of
from zero_models import (
    Decoder,
    backward,
    batch,
    distributed,
    make,
    plan_for,
    schedule_of,
    train_alike,
)

DP, DP_TP, HSDP = {"dp": 4}, {"dp": 2, "tp": 2}, {"replica": 2, "dp": 2}
MESHES = [DP, DP_TP, HSDP]
Step = Callable[[nn.Module, int], None]


def accumulated(model: nn.Module, seed: int) -> None:
    with no_sync(model):
        backward(model, seed)
    backward(model, seed + 1)
    backward(model, seed + 2)


def twice(model: nn.Module, seed: int) -> None:
    """Two forwards before one backward."""
    torch.manual_seed(seed)
    (model(*batch(seed)) + model(*batch(seed + 1))).backward()


def kept(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    loss = model(*batch(seed))
    loss.backward(retain_graph=True)
    loss.backward()


def by_autograd(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    ones = list(model.parameters())
    for one, gradient in zip(ones, torch.autograd.grad(model(*batch(seed)), ones), strict=True):
        one.grad = gradient


def penalised(model: nn.Module, seed: int) -> None:
    """Stored parameters are used outside of the model, too."""
    torch.manual_seed(seed)
    loss = model(*batch(seed)).full_tensor()
    # Of each by itself: with tp, not all parameters are stored over the axes in one order.
    squares = [one.square().sum().full_tensor() for one in model.blocks.parameters()]
    (loss + sum(squares)).backward()


def raised(model: nn.Module, seed: int) -> None:
    class Refused(RuntimeError):
        pass

    def refuse(gradient: Any) -> None:
        raise Refused

    handle = model.blocks[0].norm.register_forward_hook(
        lambda *a: a[2].register_hook(refuse) and None
    )
    torch.manual_seed(seed)
    loss = model(*batch(seed))
    handle.remove()
    with pytest.raises(Refused):
        loss.backward()
    model.zero_grad()
    backward(model, seed)


def frozen(model: nn.Module, seed: int) -> None:
    model.blocks[1].requires_grad_(seed % 2 == 0)
    backward(model, seed)


STEPS: tuple[Step, ...] = (
    backward,
    accumulated,
    twice,
    kept,
    by_autograd,
    penalised,
    raised,
    frozen,
)


def alike(
    rank: int, world_size: int, sizes: dict[str, int], zero: Any, step: Step, behind: Any, how: Any
) -> None:
    models = [distributed(make(**how), sizes, zero, reduce_ahead=n) for n in (0, behind)]
    # Before any step: a schedule adds a hook to all optimizers, and simulated ranks share those.
    copied = copy.deepcopy(models[1])
    train_alike(models, step, 3)
    backward(copied, 9)
    # These blocks are small: all of them may be on their way.
    assert schedule_of(copied).reduce_ahead == (
        len(models[1].blocks) if behind == "auto" else behind
    )
    for unit in schedule_of(models[1]).units:
        assert unit._early is None


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("sizes", "zero", "behind"),
    [(DP, 3, 1), (DP_TP, 3, 2), (HSDP, 1, 1), (DP, 2, 5), (DP, 3, "auto")],
    ids=str,
)
def test_the_bits_of_reductions_that_are_waited_for(
    sizes: dict[str, int], zero: int, step: Step, behind: Any
):
    simulate(prod(sizes.values()))(alike, sizes, zero, step, behind, {})


@pytest.mark.parametrize("how", [{"inside": False}, {"around": False}, {"around": True}], ids=str)
def test_recomputed_blocks(how: dict[str, bool]):
    simulate(2)(alike, {"dp": 2}, 3, backward, 1, how)


def under_way(rank: int, world_size: int, behind: Any) -> list[int]:
    """How many reductions were under way after each start and end, in the third step."""
    model = distributed(make(blocks=4), {"dp": world_size}, 3, reduce_ahead=behind)
    seen: list[int] = []
    ours = {id(b) for unit in schedule_of(model).units for b in unit.buffers}
    for seed in range(3):
        now = 0
        seen.clear()

        def began(buffer: FlatBuffer, before: Any = FlatBuffer.start_reduce) -> Any:
            nonlocal now
            if id(buffer) in ours:
                now += 1
                seen.append(now)
            return before(buffer)

        def ended(buffer: FlatBuffer, started: Any, before: Any = FlatBuffer.finish_reduce) -> Any:
            nonlocal now
            if id(buffer) in ours:
                now -= 1
                seen.append(now)
            return before(buffer, started)

        for unit in schedule_of(model).units:
            for buffer in unit.buffers:
                buffer.start_reduce = began.__get__(buffer)  # type: ignore[method-assign]
                buffer.finish_reduce = ended.__get__(buffer)  # type: ignore[method-assign]
        model.zero_grad()
        with trace() as records:
            backward(model, seed)
        together = behind == "auto" and seed
        sent = [one for one in records.records if one.op == "reduce_scatter"]
        assert len(sent) == (1 if together else 5)
        if not seed:
            assert not seen  # the order is not known yet
        assert now == 0
    return list(seen)


@pytest.mark.parametrize("behind", [0, 1, 2, "auto"])
def test_no_more_than_the_bound_are_under_way(behind: Any):
    # Left open, small as they are, they wait for the root's, and are sent together.
    bound = 5 if behind == "auto" else behind
    for seen in simulate(2)(under_way, behind):
        # All four blocks, whose gradients are reduced behind; the root comes last.
        assert max(seen, default=0) == bound
        assert len(seen) == (2 * max(bound, 4) if bound else 0)
        # As many as there may be, and one more is started only when one has ended.
        assert seen[:bound] == list(range(1, bound + 1))


class Rows(NamedTuple):
    """Of a flat buffer, what the choice goes by."""

    unit: str
    packed_bytes: int
    zero: int = 3
    trainable: bool = True


MIB = 1 << 20


@pytest.mark.parametrize(
    ("said", "buffers", "units", "packed"),
    [
        # All of them, and the rest of the model is not behind anything.
        (None, [Rows("a", MIB), Rows("b", 2 * MIB), Rows("", 9 * MIB)], 2, 3 * MIB),
        # So many that any of them fit: the largest count.
        (None, [Rows(str(i), i * MIB) for i in range(1, 5)], 1, 4 * MIB),
        (None, [Rows(str(i), MIB) for i in range(9)], 4, 4 * MIB),
        (None, [Rows("a", 2 * MIB), Rows("a", 3 * MIB), Rows("b", 5 * MIB)], 0, 0),
        # What level 1 packs into is kept in any case; frozen parameters are not packed.
        (None, [Rows("a", 9 * MIB, zero=1), Rows("b", 9 * MIB, zero=1)], 2, 0),
        (None, [Rows("a", MIB), Rows("b", 9 * MIB, trainable=False)], 1, MIB),
        (1, [Rows("a", 9 * MIB), Rows("b", 8 * MIB)], 1, 9 * MIB),
        (0, [Rows("a", MIB)], 0, 0),
    ],
)
def test_as_many_as_cost_nothing(said: int | None, buffers: Any, units: int, packed: int):
    found = reduce_ahead_of(said, buffers)
    assert found == ReduceAhead(units, packed, said is None)


def test_of_the_rest_alone_nothing_is_chosen():
    assert reduce_ahead_of(None, [Rows("", MIB)]) is None
    assert reduce_ahead_of(None, []) is None


@pytest.mark.parametrize(
    ("words", "width", "text"),
    [
        ({}, 12, "up to 3 units are reduced while backward computes, in 2.6 KiB at most"),
        ({}, 12, "(reduce_ahead='auto': as many as stay below 4.0 MiB)"),
        (
            {},
            1 << 16,
            "waits for each reduction (reduce_ahead='auto': one more would take over 4.0 MiB)",
        ),
        ({"reduce_ahead": 1}, 1 << 16, "up to 1 unit are reduced"),
        ({"reduce_ahead": 0}, 12, "backward waits for each reduction (reduce_ahead=0)"),
    ],
)
def test_what_is_chosen_is_told(words: Any, width: int, text: str):
    with torch.device("meta"):
        model = Decoder(width=width)
    report = plan_for(DP, 3, **words).check(model, DP)
    assert text in str(report)
    assert json.loads(report_json(report))["reduce_ahead"]["units"] == report.reduce_ahead.units


def test_where_nothing_is_reduced_behind_nothing_is_told():
    assert plan_for(DP, 0).check(make(), DP).reduce_ahead is None
    assert plan_for({"dp": 1}, 3).check(make(), {"dp": 1}).reduce_ahead is None
