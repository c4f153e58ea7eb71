"""Losses, norms and parameters have the same bits on any number of data-parallel ranks."""

import functools
from typing import Any

import pytest
import torch
from invariant_runs import OPTIONS, batch, build, digest, resumed, steps, trained
from torch import Tensor
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_dtensor import DTensor
from vescale_parallel import (
    Invariant,
    Plan,
    captured_units,
    forward_backward,
    parallelize,
    sum_over_shards,
)
from vescale_parallel import mesh as make_mesh
from zero_models import Decoder, whole


@functools.cache
def alone(number: int = 2, rows: int = 11) -> tuple[list[str], str]:
    return trained({"dp": 1}, 0, number, rows)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_same_bits_on_any_number_of_ranks(ranks: int, zero: int):
    assert trained({"dp": ranks}, zero) == alone()


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_fewer_rows_than_shards_and_even_ones(rows: int):
    assert trained({"dp": 3}, 3, 2, rows) == alone(2, rows)


@pytest.mark.parametrize(
    ("first", "second"), [((2, 3), (3, 1)), ((3, 0), (1, 0)), ((1, 0), (4, 3))], ids=str
)
def test_resumed_on_another_number_of_ranks(first: Any, second: Any):
    assert resumed(first, second) == alone(4)


BY_RULE = [({"replica": 2, "dp": 2}, 3), ({"dp": 2}, {"*.bias": 0, "{embed,head}*": 1, "*": 3})]


@pytest.mark.parametrize(("sizes", "zero"), BY_RULE, ids=str)
def test_hybrid_shards_and_levels_by_rule(sizes: Any, zero: Any):
    assert trained(sizes, zero) == alone()


@pytest.mark.parametrize(
    ("ranks", "zero", "checkpoint"), [(1, 0, None), (2, 3, "full"), (3, 2, None), (4, 1, "full")]
)
def test_captured(ranks: int, zero: int, checkpoint: str | None):
    words = {"static": True, "checkpoint": checkpoint}
    # Of one shard there is one row more or less than of another: two programs.
    assert trained({"dp": ranks}, zero, 3, 13, **words) == alone(3, 13)


def test_shards_leave_the_generators_of_accelerators_alone(monkeypatch: pytest.MonkeyPatch):
    """On a mesh of CPUs; `fork_rng` would not restore those of a GPU."""
    seeded: list[int] = []

    def run(rank: int, world_size: int) -> None:
        model = build({"dp": 2}, 0)
        steps(model, torch.optim.SGD(model.parameters()), range(1))

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    simulate(2).run(run)
    assert set(seeded) == {0}  # of `build`


@on_ranks(2, simulated=True)
def test_captured_shards_are_replayed():
    model = build({"dp": 2}, 3, static=True)
    steps(model, torch.optim.SGD(model.parameters()), range(3))
    units = [one for one in captured_units(model) if one.name.startswith("blocks")]
    # Two blocks; four turns of a step on each rank, idle ones too.
    assert [one.programs + one.replays for one in units] == [3 * 4] * 2, units
    assert all(one.refusal is None and one.programs <= 2 for one in units)


@pytest.mark.parametrize("zero", [0, 3])
def test_beside_tensor_parallel(zero: int):
    # A mesh without the axis of the batch is one rank of it.
    assert trained({"dp": 2, "tp": 2}, zero, 2) == trained({"tp": 2}, 0, 2)


def transposed(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    model[0].weight.data = torch.randn(4, 6).t()
    plan = Plan(deterministic=Invariant(4))
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


@pytest.mark.parametrize("zero", [0, 2])
@on_ranks(2, simulated=True)
def test_it_is_plain_torch_that_adds_up_shards(rank: int, world_size: int, zero: int):
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


@on_ranks(2, simulated=True)
def test_evaluation_is_whole():
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


def clipped(sizes: Any, zero: Any, make: Any) -> Any:
    """Losses, torch's own norms and the digest after two steps."""

    def run(rank: int, world_size: int) -> Any:
        model = build(sizes, zero)
        optimizer = make(model.parameters())
        found = []
        for step in range(2):
            optimizer.zero_grad()
            loss = forward_backward(model, *batch(step))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            largest = torch.nn.utils.get_total_norm(
                [one.grad for one in model.parameters()], float("inf")
            )
            optimizer.step()
            found += [whole(one).item().hex() for one in (loss, norm, largest)]
        return found, digest(model)

    return simulate(torch.Size(sizes.values()).numel()).run(run)[0]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor])
def test_norms_that_torch_takes_of_stored_shards(make: Any):
    expected = clipped({"dp": 1}, 0, make)
    for sizes, zero in (
        ({"dp": 2}, 1),
        ({"dp": 3}, 2),
        ({"dp": 4}, 3),
        ({"dp": 2, "replica": 2}, 3),
    ):
        assert clipped(sizes, zero, make) == expected, (sizes, zero)


class Normed(torch.nn.Module):
    """Batch norms of every kind that is allowed, one of them called twice, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first = torch.nn.Conv2d(2, 5, 3), torch.nn.BatchNorm2d(5)
        self.twice = torch.nn.BatchNorm2d(5, momentum=None)
        self.free = torch.nn.BatchNorm2d(5, track_running_stats=False)
        self.frozen = torch.nn.BatchNorm1d(5).eval()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(5, 5) for _ in range(2)])
        self.last = torch.nn.BatchNorm1d(5, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.first(self.conv(x)))
        x = self.frozen(self.free(self.twice(x.relu())).mean((2, 3)))
        for block in self.blocks:
            x = block(x).relu()
        return self.last(x)


def normed(sizes: Any, zero: int, **words: Any) -> Any:
    def run(rank: int, world_size: int) -> Any:
        torch.manual_seed(0)
        plan = Plan(zero=zero, deterministic=Invariant(4), **words)
        model = parallelize(Normed(), make_mesh(device_type="cpu", **sizes), plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(3):
            x = torch.randn(13, 2, 5, 5, generator=torch.Generator().manual_seed(step))
            loss = forward_backward(model, x, loss=lambda out: out.pow(3).mean())
            optimizer.step()
            optimizer.zero_grad()
            right = sum_over_shards(
                model,
                lambda x: {"right": (model(x) > 0).sum(), "of": [x.square().sum(), len(x)]},
                x,
            )
            found += [loss.item().hex(), str(right)]
        return found, digest(model), {k: v.tolist() for k, v in model.named_buffers()}

    every = simulate(torch.Size(sizes.values()).numel()).run(run)
    assert all(one == every[0] for one in every)
    return every[0]


@pytest.mark.parametrize("zero", [0, 3])
def test_batch_norms_and_metrics(zero: int):
    expected = normed({"dp": 1}, 0)
    assert "'of': [tensor(" in expected[0][1]
    for ranks in (2, 3, 4):
        assert normed({"dp": ranks}, zero) == expected
    assert normed({"dp": 2}, zero, checkpoint="full") == expected
    assert normed({"dp": 2}, zero, checkpoint="1KB") == expected


def test_running_statistics_are_those_of_the_whole_batch():
    x = torch.randn(13, 3, 4, 4, generator=torch.Generator().manual_seed(1)) * 3 + 1
    plain = torch.nn.BatchNorm2d(3, momentum=0.3)
    plain(x)

    def run(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm2d(3, momentum=0.3)
        model = torch.nn.Sequential(norm, torch.nn.Conv2d(3, 1, 1))
        plan = Plan(deterministic=Invariant(4))
        report = str(plan.check(model, {"dp": 2}))
        assert "1 batch norm: normalised by the rows of one logical shard" in report
        parallelize(model, make_mesh(device_type="cpu", dp=2), plan)
        with torch.no_grad():
            forward_backward(model, x, loss=lambda out: out.mean())
        torch.testing.assert_close(norm.running_mean, plain.running_mean)
        torch.testing.assert_close(norm.running_var, plain.running_var)
        assert norm.num_batches_tracked == 1
        assert norm.momentum == 0.3

    simulate(2)(run)


@on_ranks(2, simulated=True)
def test_metrics_of_a_model_that_is_not_invariant():
    model = parallelize(torch.nn.Linear(3, 1), make_mesh(device_type="cpu", dp=2))
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    found = sum_over_shards(model, lambda x: model(x).sum(), x)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), model(x).sum().full_tensor().detach())
