"""Modules that are replaced, grown or stripped of a norm, before and after `parallelize`.

What comes is trained as on one device (as a plain parameter, which every rank has), or refused by
name on every rank.
"""

from typing import Any

import pytest
import torch
from stage_runs import failures_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations
from vescale_comm import simulate
from vescale_dtensor import DTensor
from vescale_parallel import Pipeline, Plan, deferred, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh

WORDS, WIDTH, NEW = 10, 6, 13


class Net(nn.Module):
    def __init__(self, *, tied: bool = False, normed: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if normed:
            for one in self.blocks:
                parametrizations.weight_norm(one[0])
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grow(model: Any, *, tied: bool) -> None:
    """As `resize_token_embeddings` does of a model that is not distributed."""
    torch.manual_seed(9)
    emb, head = nn.Embedding(NEW, WIDTH), nn.Linear(WIDTH, NEW, bias=False)
    with torch.no_grad():
        emb.weight[:WORDS] = whole(model.emb.weight)
        head.weight[:WORDS] = whole(model.head.weight)
    model.emb, model.head = emb, head
    if tied:
        head.weight = emb.weight


def step(model: nn.Module, words: int, times: int = 1) -> None:
    draws = torch.Generator().manual_seed(words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(times):
        forward_backward(model, torch.randint(words, (4, 5), generator=draws))
        optimizer.step()
        optimizer.zero_grad()


def require_same(model: nn.Module, plain: nn.Module) -> None:
    pairs = zip(model.named_parameters(), plain.named_parameters(), strict=True)
    for (name, one), (other, expected) in pairs:
        assert name == other
        torch.testing.assert_close(whole(one), expected, rtol=1e-4, atol=1e-6)


Sizes = dict[str, int]
LAYOUTS: list[tuple[Sizes, int]] = [
    ({"dp": 2}, 0),
    ({"tp": 2}, 0),
    ({"dp": 2}, 1),
    ({"dp": 2}, 3),
    ({"dp": 2, "tp": 2}, 3),
    ({"pp": 2}, 0),
    ({"pp": 2, "dp": 2}, 3),
]


def over(sizes: Sizes, zero: int, model: nn.Module) -> nn.Module:
    stages = {"pipeline": Pipeline(stages="blocks.*")} if "pp" in sizes else {}
    rules = {"{emb,head}.weight": "tp:0", "*": "replicate"}
    plan = Plan(parameters=rules, zero=zero, **stages)
    return parallelize(model, make_mesh(device_type="cpu", **sizes), plan)


def seeded(**options: bool) -> Net:
    torch.manual_seed(0)
    return Net(**options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", ["plain", "deferred", "grown deferred"])
@pytest.mark.parametrize(("sizes", "zero"), LAYOUTS, ids=str)
def test_a_vocabulary_that_grows_before(sizes: Sizes, zero: int, how: str, tied: bool):
    def on_a_rank(rank: int, world_size: int) -> None:
        plain, model = seeded(tied=tied), seeded(tied=tied)
        grow(plain, tied=tied)
        if how != "plain":
            with deferred():
                model = seeded(tied=tied)
                if how == "grown deferred":
                    grow(model, tied=tied)
        if how != "grown deferred":
            grow(model, tied=tied)
        over(sizes, zero, model)
        for one in (plain, model):
            step(one, NEW, 2)
        require_same(model, plain)

    simulate(torch.Size(sizes.values()).numel())(on_a_rank)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("sizes", "zero"), LAYOUTS, ids=str)
def test_a_vocabulary_that_grows_after(sizes: Sizes, zero: int, tied: bool):
    def on_a_rank(rank: int, world_size: int) -> str:
        plain, model = seeded(tied=tied), over(sizes, zero, seeded(tied=tied))
        for one in (plain, model):
            step(one, WORDS)
            grow(one, tied=tied)
        told = failures_of(lambda: step(model, NEW, 2))
        if told == "none":
            step(plain, NEW, 2)
            require_same(model, plain)
        return told

    for told in simulate(torch.Size(sizes.values()).numel())(on_a_rank):
        assert ("'emb.weight'" in told and "came after parallelize" in told) == ("pp" in sizes)


@pytest.mark.parametrize(("sizes", "zero"), [one for one in LAYOUTS if "tp" not in one[0]], ids=str)
def test_a_weight_norm_that_is_removed_after_training(sizes: Sizes, zero: int):
    def on_a_rank(rank: int, world_size: int) -> str:
        plain, model = seeded(normed=True), over(sizes, zero, seeded(normed=True))
        for one in (plain, model):
            step(one, WORDS)
            for block in one.blocks:
                remove_parametrizations(block[0], "weight")
        require_same(model, plain)  # as it is saved
        told = failures_of(lambda: step(model, WORDS, 2))
        if told == "none":
            step(plain, WORDS, 2)
            require_same(model, plain)
        return told

    for told in simulate(torch.Size(sizes.values()).numel())(on_a_rank):
        assert ("'blocks.0.0.weight'" in told and "came after" in told) == ("pp" in sizes)


@pytest.mark.parametrize(("sizes", "zero"), LAYOUTS, ids=str)
def test_memory_without_values(sizes: Sizes, zero: int):
    """`to_empty` keeps layouts; of the meta device there is none, and `deferred` is named."""

    def on_a_rank(rank: int, world_size: int) -> str:
        plain, model = seeded(), over(sizes, zero, seeded())
        model.to_empty(device="cpu")
        for one in (plain, model):
            torch.manual_seed(4)
            for module in one.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    module.reset_parameters()
            step(one, WORDS, 2)
        require_same(model, plain)
        with torch.device("meta"):
            empty = Net()
        return failures_of(lambda: over(sizes, zero, empty))

    for told in simulate(torch.Size(sizes.values()).numel())(on_a_rank):
        assert "under vescale_parallel.deferred()" in told
