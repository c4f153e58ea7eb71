"""Experts beside the other words of a plan: one device's losses and norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import vescale_parallel as vp
from expert_models import COLUMNS_AND_ROWS, ROWS, WIDTH, Net, train
from torch import Tensor, nn
from vescale_comm import simulate

BOTH = {"batch": "dp:0, ep:0", "experts": "ep"}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "context": ({"cp": 2, "ep": 2}, {"batch": "ep:0, cp:1", "experts": "ep"}),
    "experts over the context": ({"dp": 2, "cp": 2}, {"batch": "dp:0, cp:1", "experts": "cp"}),
    "sequence parallel": (
        {"ep": 2, "tp": 2},
        {
            "batch": "ep:0",
            "experts": "ep",
            "parameters": COLUMNS_AND_ROWS,
            "activations": {"embed": "-> tp:1", "blocks.*": "-> 0 = tp:1", "head": "tp:full ->"},
        },
    ),
    "selective": ({"dp": 2, "ep": 2}, {**BOTH, "checkpoint": "selective", "zero": 3}),
    "precision": ({"dp": 2, "ep": 2}, {**BOTH, "zero": 2, "precision": {"reduce": "float64"}}),
}


def made(sizes: dict[str, int], words: dict[str, Any], **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net()
    vp.parallelize(model, vp.mesh(**sizes, device_type="cpu"), vp.Plan(**words), **options)
    return model


def alone() -> list[float]:
    torch.manual_seed(0)
    return train(Net())[0]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_norms(case: str):
    sizes, words = CASES[case]
    expected = alone()
    for found in simulate(4).run(lambda rank, world_size: train(made(sizes, words))[0]):
        assert found == pytest.approx(expected, rel=1e-5)


def test_recordings_do_not_keep_where_tokens_went():
    def run(rank: int, world_size: int) -> list[float]:
        model = made({"dp": 2, "ep": 2}, BOTH, static=True)
        losses = train(model)[0]
        refused = [one for one in vp.captured_units(model) if one.refusal]
        assert all(one.programs == 0 for one in refused)
        return losses

    expected = alone()
    for found in simulate(4).run(run):
        assert found == pytest.approx(expected, rel=1e-5)


def own_rows(rank: int, world_size: int) -> list[float]:
    model = made({"dp": 2, "ep": 2}, {**BOTH, "batch_is": "local"})
    cuts = [0, 3, 3, 4, ROWS]  # one rank has no row

    def step(tokens: Tensor) -> Tensor:
        mine, labels = (one[cuts[rank] : cuts[rank + 1]] for one in (tokens, tokens.roll(1, 1)))
        loss: Tensor = model(mine, labels)
        loss.backward()
        return loss

    return train(model, 3, step)[0]


def test_rows_of_each_rank():
    expected = alone()
    for found in simulate(4).run(own_rows):
        assert found == pytest.approx(expected, rel=1e-5)


class Blocks(nn.Module):
    """Logits, of blocks that stages can share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([vp.MoE(WIDTH, 24, 6, 2) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_steps(sizes: dict[str, int], words: dict[str, Any]) -> Callable[..., list[float]]:
    def run(rank: int, world_size: int) -> list[float]:
        torch.manual_seed(0)
        model = Blocks()
        vp.parallelize(model, vp.mesh(**sizes, device_type="cpu"), vp.Plan(**words))

        def step(tokens: Tensor) -> Tensor:
            return vp.forward_backward(model, tokens, loss=(loss_of, tokens.roll(1, 1)))

        return train(model, 3, step)[0]

    return run


def test_stages():
    expected = simulate(1).run(by_steps({"dp": 1}, {"microbatches": 2}))[0]
    words = {"batch": "ep:0", "experts": "ep", "pipeline": "1f1b", "microbatches": 2}
    for found in simulate(4).run(by_steps({"pp": 2, "ep": 2}, words)):
        assert found == pytest.approx(expected, rel=1e-5)


def test_stages_and_zero_over_the_axis_of_experts_are_refused():
    words = {"batch": "ep:0", "experts": "ep", "pipeline": "1f1b", "microbatches": 2}
    plan = vp.Plan(zero=vp.Zero(2, over="ep"), **words)
    with pytest.raises(vp.PlanError, match="Shard them over another axis"):
        plan.check(Blocks(), {"pp": 2, "ep": 2})


def test_logical_shards():
    words = {"deterministic": vp.Invariant(4)}
    expected = simulate(1).run(by_steps({"dp": 1}, words))[0]
    words |= {"batch": "dp:0", "experts": "ep"}
    for found in simulate(4).run(by_steps({"dp": 2, "ep": 2}, words)):
        assert found == pytest.approx(expected, rel=1e-5)


def kept(experts: int, ranks: int) -> int:
    """Bytes that a rank stores of parameters and optimizer states."""
    torch.manual_seed(0)
    model = vp.MoE(WIDTH, 24, experts, 2)
    vp.parallelize(model, vp.mesh(ep=ranks, device_type="cpu"), vp.Plan(batch="ep:0", experts="ep"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [*model.parameters(), *(one for one in states if one.ndim)]
    return sum(one.to_local().numel() * 4 for one in held if "Shard" in str(one.placements))


def test_what_a_rank_stores_falls_with_their_number():
    per_expert = 3 * (2 * 24 * WIDTH + WIDTH * 24) * 4
    for ranks in (2, 4):
        assert (
            simulate(ranks).run(lambda rank, world_size: kept(8, world_size))
            == [8 // ranks * per_expert] * ranks
        )
