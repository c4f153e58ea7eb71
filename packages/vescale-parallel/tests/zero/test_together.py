"""With `prefetch="auto"` forward gathers small units of level 3 together, with the same bits.

Trained beside the same plan with `prefetch=1`, where each unit is gathered by itself.
"""

from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from vescale_comm import simulate, trace
from vescale_comm.testing import run
from vescale_parallel import captured_units, parallelize
from vescale_parallel import mesh as make_mesh
from vescale_parallel._zero import joint_gathers
from zero_models import (
    batch,
    distributed,
    local,
    make,
    plan_for,
    require_alike,
    schedule_of,
    train_alike,
)

DP, DP_TP, HSDP = {"dp": 4}, {"dp": 2, "tp": 2}, {"replica": 2, "dp": 2}
BLOCKS = 3


def both(sizes: dict[str, int], zero: Any, **words: Any) -> list[Any]:
    return [distributed(make(), sizes, zero, prefetch=n, **words) for n in (1, "auto")]


def forward(model: nn.Module, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    loss: torch.Tensor = model(*batch(seed))
    return loss


def gathers(model: nn.Module, seed: int) -> int:
    """How many collectives gather in a forward, which is followed by its backward."""
    with trace() as seen:
        loss = forward(model, seed)
    loss.backward()
    # Those over `tp` gather activations.
    found = [one for one in seen.records if one.op == "all_gather" and one.axes == ("dp",)]
    return len(found)


def trained(rank: int, world_size: int, sizes: dict[str, int], zero: Any, words: Any) -> None:
    models = both(sizes, zero, **words)
    evaluated: list[torch.Tensor] = []

    def step(model: nn.Module, seed: int) -> int:
        sent = gathers(model, seed)
        with torch.inference_mode(seed % 2 == 0), torch.no_grad():
            evaluated.append(forward(model, seed).full_tensor())
        return sent

    for seed, found in enumerate(train_alike(models, step)):
        # In the first forward nobody knows what comes next.
        assert found[0] - found[1] == (BLOCKS if seed and zero == 3 else 0)
    assert all(map(torch.equal, evaluated[::2], evaluated[1::2]))
    assert all(schedule_of(one).gathered_bytes == 0 for one in models) or zero != 3


@pytest.mark.parametrize(("sizes", "zero"), [(DP, 3), (DP, 1), (DP_TP, 3), (HSDP, 3)], ids=str)
def test_the_bits_of_units_that_are_gathered_one_by_one(sizes: dict[str, int], zero: int):
    simulate(prod(sizes.values()))(trained, sizes, zero, {})


@pytest.mark.parametrize(
    "words",
    [
        {"precision": {"compute": "bfloat16", "reduce": "float32"}},
        {"reduce_ahead": 0},
        {"checkpoint": "full"},
    ],
    ids=str,
)
def test_the_bits_with_other_words(words: dict[str, Any]):
    simulate(4)(trained, DP, 3, words)


def of_some(rank: int, world_size: int) -> None:
    models = both(DP, 3)
    for seed, wanted in enumerate([4, 2]):
        assert [gathers(model, seed) for model in models] == [4, wanted]
    require_alike(models)


def test_no_more_than_the_bound_are_gathered_together(monkeypatch: pytest.MonkeyPatch):
    root, block, *_ = [one.gathered_bytes for one in plan_for(DP).check(make(), DP).buffers]
    # The root and a block, then the two others: three are too many by a little.
    monkeypatch.setattr(joint_gathers, "TOGETHER_BYTES", 2 * block + 4)
    assert root + block <= 2 * block + 4 < root + 2 * block
    simulate(4)(of_some)


def rewritten(rank: int, world_size: int, zero: int, unseen: bool) -> None:
    """A forward that writes to the parameters of a unit that comes later in it."""
    models = both(DP, zero)

    def write(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            for one in models[module.which].blocks[2].parameters():
                # What writes to a local tensor that was handed out, versions may miss.
                (local(one) if unseen else one).mul_(1.5)

    for which, model in enumerate(models):
        model.blocks[0].which = which
        # When the next unit is on its way at the latest, whichever it is.
        model.blocks[0].register_forward_pre_hook(write)
    for seed in range(3):
        losses = [forward(model, seed) for model in models]
        assert torch.equal(*(one.full_tensor() for one in losses))
        for loss in losses:
            loss.backward()
        require_alike(models)


@pytest.mark.parametrize(("zero", "unseen"), [(1, False), (3, False), (3, True)])
def test_what_a_forward_writes_is_gathered_again(zero: int, unseen: bool):
    simulate(4)(rewritten, zero, unseen)


def static(rank: int, world_size: int) -> None:
    models = []
    for ahead in (1, "auto"):
        plan = plan_for(DP, 3, prefetch=ahead)
        models.append(parallelize(make(), make_mesh(device_type="cpu", **DP), plan, static=True))
    train_alike(models, lambda model, seed: forward(model, seed).backward())
    # One recording each, though a unit's values arrive in other memory from the second step on.
    assert all(one.programs == 1 for one in captured_units(models[1])[1:])


def test_static_units():
    run(static, 4)
