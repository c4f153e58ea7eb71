"""A model whose parameters, gradients or states are sharded over `dp` trains like one device."""

from math import prod
from typing import Any

import pytest
import torch
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_dtensor import DTensor
from zero_models import (
    adamw,
    batch,
    distributed,
    make,
    require_same_values,
    schedule_of,
    train,
    train_scaled,
    whole,
)

MESHES = [
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"replica": 2, "dp": 2},
    {"dp": 3},
]


def compare(rank: int, world_size: int, sizes: dict[str, int], zero: Any, options: Any) -> None:
    plain = make(**options)
    model = distributed(make(**options), sizes, zero)
    require_same_values(model, plain, rtol=0, atol=0)
    expected, found = train(plain, 4), train(model, 4)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    require_same_values(model, plain, rtol=1e-4, atol=2e-5)
    schedule = schedule_of(model)
    assert schedule.gathered_bytes == 0
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, torch.nn.Parameter), name
        assert isinstance(parameter, DTensor), name


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_it_trains_like_one_device(sizes: dict[str, int], zero: int):
    run(compare, prod(sizes.values()), sizes, zero, {})


UNEVEN = {"width": 7, "vocabulary": 17}


@pytest.mark.parametrize(
    ("sizes", "zero", "options"),
    [
        ({"dp": 4}, 3, UNEVEN),
        ({"dp": 2, "tp": 2}, 3, UNEVEN),
        ({"dp": 2, "tp": 2}, 2, UNEVEN),
        ({"dp": 4}, 3, {"tied": False, "blocks": 1}),
        ({"dp": 2, "tp": 2}, {"*.down.weight": 2, "*norm*": 0, "{embed,head}*": 1, "*": 3}, {}),
        ({"dp": 4}, {"*.bias": 0, "*": 3}, {}),
        # More ranks than most parameters have elements.
        ({"dp": 8}, 3, {"blocks": 1}),
    ],
    ids=str,
)
def test_shapes_and_levels_that_do_not_fit_evenly(sizes: Any, zero: Any, options: Any):
    run(compare, prod(sizes.values()), sizes, zero, options)


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"inside": False}, {"inside": True}, {"inside": "all"}, {"around": False}, {"around": True}],
    ids=str,
)
def test_activation_checkpointing(sizes: dict[str, int], options: dict[str, Any]):
    run(compare, 4, sizes, 3, options)


def optimizer_from_before(rank: int, world_size: int) -> None:
    plain, model = make(), make()
    expected_optimizer, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    one = train(plain, 2, lambda _: expected_optimizer)
    two = train(model, 2, lambda _: optimizer)
    assert one == two
    model.zero_grad()
    distributed(model, {"dp": 2, "tp": 2}, 3)
    state = optimizer.state[model.blocks[0].mlp.up.weight]["exp_avg"]
    assert isinstance(state, DTensor)
    expected = train(plain, 2, lambda _: expected_optimizer)
    found = train(model, 2, lambda _: optimizer)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    plain_state = expected_optimizer.state[plain.blocks[0].mlp.up.weight]["exp_avg"]
    torch.testing.assert_close(whole(state), plain_state, rtol=1e-4, atol=1e-6)


def test_an_optimizer_made_before_is_taken_over():
    run(optimizer_from_before, 4)


def one_process(rank: int, world_size: int) -> None:
    assert train(distributed(make(), {"dp": 1, "tp": 1}, 3), 2) == train(make(), 2)


def test_a_mesh_of_one_process_shards_nothing():
    run(one_process, 1)


def scaled(rank: int, world_size: int) -> None:
    found = []
    for model in (make(), distributed(make(), {"dp": 2, "tp": 2}, 3)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_scaled(model, scaler, optimizer, 3)
        found.append(model)
    require_same_values(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_grad_scaler_and_clip_grad_value():
    run(scaled, 4)


def closures(rank: int, world_size: int, sizes: dict[str, int], search: str | None) -> None:
    found = []
    for model in (make(blocks=1), distributed(make(blocks=1), sizes, 3)):
        model.eval()
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=3, history_size=2, line_search_fn=search
        )
        losses: list[float] = []
        for _ in range(2):

            def closure(
                model: Any = model, optimizer: Any = optimizer, losses: list[float] = losses
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(*batch(0))
                loss.backward()
                losses.append(loss.item())
                return loss

            optimizer.step(closure)
        found.append(losses)
    # What the search divides by becomes small, so that rounding grows from step to step.
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("sizes", "search"), [({"dp": 4}, None), ({"dp": 2, "tp": 2}, "strong_wolfe")], ids=str
)
def test_an_optimizer_that_calls_for_losses_itself(sizes: dict[str, int], search: str | None):
    simulate(4).run(closures, sizes, search)
