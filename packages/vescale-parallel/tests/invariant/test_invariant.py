"""Losses, norms and parameters have the same bits on any number of data-parallel ranks."""

import functools
from typing import Any

import pytest
import torch
from invariant_runs import OPTIONS, batch, build, digest, resumed, trained
from torch import Tensor
from vescale_comm import simulate
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import Decoder, whole


@functools.cache
def alone(number: int = 2, rows: int = 11) -> tuple[list[str], str]:
    return trained({"dp": 1}, 0, number, rows)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_same_bits_on_any_number_of_ranks(ranks: int, zero: int):
    assert trained({"dp": ranks}, zero) == alone()


def test_two_and_three_ranks_with_zero_3():
    assert trained({"dp": 2}, 3) == trained({"dp": 3}, 0) == alone()


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_fewer_rows_than_shards_and_even_ones(rows: int):
    assert trained({"dp": 3}, 3, 2, rows) == alone(2, rows)


@pytest.mark.parametrize(
    ("first", "second"), [((2, 3), (3, 1)), ((3, 0), (1, 0)), ((1, 0), (4, 3))], ids=str
)
def test_resumed_on_another_number_of_ranks(first: Any, second: Any):
    assert resumed(first, second) == alone(4)


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        ({"replica": 2, "dp": 2}, 3),
        ({"dp": 2}, {"*.bias": 0, "{embed,head}*": 1, "*": 3}),
    ],
    ids=str,
)
def test_hybrid_shards_and_levels_by_rule(sizes: Any, zero: Any):
    assert trained(sizes, zero) == alone()


@pytest.mark.parametrize("zero", [0, 3])
def test_beside_tensor_parallel(zero: int):
    # A mesh without the axis of the batch is one rank of it.
    assert trained({"dp": 2, "tp": 2}, zero, 2) == trained({"tp": 2}, 0, 2)


def transposed(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    model[0].weight.data = torch.randn(4, 6).t()
    plan = Plan(deterministic="dp-invariant", shards=4)
    parallelize(model, make_mesh(device_type="cpu", dp=world_size), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 20).view(5, 4)
    for _ in range(2):
        optimizer.zero_grad()
        forward_backward(model, x, loss=lambda out: out.square().mean())
        optimizer.step()
    return whole(model[0].weight.detach()).flatten().tolist()


def test_parameters_in_another_memory_order():
    assert simulate(2).run(transposed)[1] == simulate(1).run(transposed)[0]


@pytest.mark.parametrize("words", [{"checkpoint": "full"}, {"precision": {"compute": "bfloat16"}}])
def test_recomputation_and_precision(words: Any):
    one = trained({"dp": 1}, 0, 2, **words)
    assert trained({"dp": 3}, 3, 2, **words) == one
    assert ("checkpoint" in words) == (one == alone(2))


def tree(values: list[Any]) -> Any:
    """The sum of the tree, written again: halves, then their sum."""
    if len(values) == 1:
        return values[0]
    one, two = tree(values[: len(values) // 2]), tree(values[len(values) // 2 :])
    return [a + b for a, b in zip(one, two, strict=True)] if isinstance(one, list) else one + two


def plain_step(model: Decoder, tokens: Tensor, targets: Tensor) -> tuple[float, list[Tensor]]:
    """One device that computes the shards itself and adds them up by hand."""
    seeds = torch.randint(2**62, (8,)).tolist()
    after = torch.get_rng_state()
    losses, found = [], []
    for seed, x, y in zip(seeds, tokens.tensor_split(8), targets.tensor_split(8), strict=True):
        torch.manual_seed(seed)
        loss = model(x, y)
        grads = torch.autograd.grad(loss * (len(x) / len(tokens)), list(model.parameters()))
        losses.append(loss.item() * len(x) / len(tokens))
        found.append(list(grads))
    torch.set_rng_state(after)
    return tree(losses), tree(found)


def accumulated(rank: int, world_size: int, zero: int) -> None:
    """Twice before a step: the bits of plain torch, dropout included."""
    model, plain = build({"dp": world_size}, zero), Decoder(**OPTIONS)
    torch.manual_seed(0)
    plain = Decoder(**OPTIONS)
    totals = None
    for step in range(2):
        torch.manual_seed(7 + step)
        expected, gradients = plain_step(plain, *batch(step))
        totals = (
            gradients if totals is None else [a + b for a, b in zip(totals, gradients, strict=True)]
        )
        end = torch.get_rng_state()
        torch.manual_seed(7 + step)
        tokens, targets = batch(step)
        loss = forward_backward(model, tokens, targets=targets)
        assert loss.item() == torch.tensor(expected).item()
        assert torch.equal(torch.get_rng_state(), end)
    for parameter, total in zip(model.parameters(), totals, strict=True):
        assert torch.equal(whole(parameter.grad), total)


@pytest.mark.parametrize("zero", [0, 2])
def test_it_is_plain_torch_that_adds_up_shards(zero: int):
    simulate(2)(accumulated, zero)


def test_evaluation_is_whole():
    def evaluate(rank: int, world_size: int) -> None:
        model = build({"dp": 2}, 3).eval()
        with torch.no_grad():
            found = model(*batch(0))
        torch.manual_seed(0)
        assert torch.equal(whole(found), Decoder(**OPTIONS).eval()(*batch(0)).detach())
        assert digest(model)
        with torch.no_grad():
            shards = forward_backward(model, *batch(0))
        torch.testing.assert_close(shards, whole(found))
        assert all(one.grad is None for one in model.parameters())

    simulate(2)(evaluate)
