"""What routers and experts cannot be given is refused on every rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_models import whole
from torch import Tensor, nn
from vescale_comm import simulate, trace
from vescale_parallel import MoE, ParallelError, Plan, mesh, parallelize

BOTH = {"batch": "ep:0", "experts": "ep"}
LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"ep": 4}, BOTH),
    ({"dp": 2, "ep": 2}, {"batch": "dp:0, ep:0", "experts": "ep"}),
    ({"ep": 2, "tp": 2}, BOTH | {"parameters": {"*.gate_up_proj": "tp:1", "*.down_proj": "tp:2",
                                                "*": "replicate"}}),
]  # fmt: skip
Change = Callable[[Any], Any]


def made(change: Change, experts: int = 6) -> nn.Module:
    """A layer whose router says something else; of six experts, the fourth rank has none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), MoE(8, 12, experts, 2))
    router = model[1].router
    forward = router.forward
    router.forward = lambda x: change(forward(x))
    return model


def step(model: nn.Module, layout: tuple[dict[str, int], dict[str, Any]] | None) -> Any:
    """Loss, gradients, and bytes of the rows that were exchanged; or an error, and exchanges."""
    if layout is not None:
        parallelize(model, mesh(**layout[0], device_type="cpu"), Plan(**layout[1]))
    x = torch.randn(12, 8)
    with trace() as sent:
        try:
            loss = model(x).square().mean()
        except Exception as error:
            # The first batches are compared over the ranks, which is something else.
            exchanges = [one for one in sent.records if one.op == "all_to_all"]
            return type(error).__name__, str(error), len(exchanges)
        loss.backward()
    # Behind the counts, which are integers.
    rows = [one for one in sent.records if one.op == "all_to_all" and one.dtype == torch.float32]
    gradients = [whole(one.grad) for one in model.parameters()]
    return whole(loss), gradients, [one.bytes for one in rows]


def everywhere(model: Callable[[], nn.Module]) -> list[Any]:
    return [
        found
        for layout in LAYOUTS
        for found in simulate(4).run(lambda rank, world_size, at=layout: step(model(), at))
    ]


REFUSED: dict[str, tuple[Change, str]] = {
    "fewer tokens": (
        lambda r: r._replace(chosen=r.chosen[:-1], weights=r.weights[:-1]),
        "12 tokens, and choices and weights of shapes (11, 2) and (11, 2)",
    ),
    "no choice": (
        lambda r: r._replace(chosen=r.chosen[:, :0], weights=r.weights[:, :0]),
        "each token has at least one",
    ),
    "weights of all experts": (  # which would be broadcast, and summed, where each token has one
        lambda r: r._replace(chosen=r.chosen[:, :1], weights=torch.ones(len(r.weights), 6)),
        "one weight for each choice",
    ),
    "choices that are no integers": (
        lambda r: r._replace(chosen=r.chosen.float()),
        "the experts that tokens chose",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_routers(what: str):
    change, words = REFUSED[what]
    for kind, said, exchanges in everywhere(lambda: made(change)):
        assert kind == "ParallelError"
        assert words in said
        assert exchanges == 0


def of_another_width() -> nn.Module:
    model = made(lambda routing: routing)
    model[1].experts = type(model[1].experts)(10, 12, 6)
    return model


def of_another_precision() -> nn.Module:
    model = made(lambda routing: routing)
    model[1].experts.double()
    return model


DO_NOT_FIT = [
    (of_another_width, "tokens of width 8, and its experts take 10 (gate_up_proj"),
    (of_another_precision, "tokens of torch.float32, and its experts are of torch.float64"),
]


@pytest.mark.parametrize(("model", "words"), DO_NOT_FIT)
def test_experts_that_tokens_do_not_fit(model: Callable[[], nn.Module], words: str):
    """A rank without experts has nothing to multiply, and would wait for the others."""
    for kind, said, exchanges in everywhere(model):
        assert kind == "ParallelError"
        assert words in said
        assert exchanges == 0


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-5, atol=1e-7, equal_nan=True)


def dropped(routing: Any) -> Any:
    """All choices, with weights as a softmax over nothing has them."""
    weights = routing.weights * float("nan")
    return routing._replace(chosen=torch.full_like(routing.chosen, 6), weights=weights)


def test_a_router_that_drops_everything():
    """No row is sent, and nobody waits: the layer says zero, as on one device."""
    wanted = step(made(dropped), None)
    assert wanted[0] == 0
    for found in everywhere(lambda: made(dropped)):
        same(found, wanted)
        assert found[2] == [0] * 4


@pytest.mark.parametrize("experts", [2, 3, 5, 7])
def test_experts_that_ranks_do_not_divide(experts: int):
    """Ranks hold uneven shares of them, or none, with one device's numbers."""
    wanted = step(made(lambda routing: routing, experts), None)
    for found in everywhere(lambda: made(lambda routing: routing, experts)):
        same(found, wanted)


@pytest.mark.parametrize("capacity", [0, -1.0, float("nan"), float("inf")])
def test_capacities(capacity: float):
    with pytest.raises(ValueError, match="a positive multiple"):
        MoE(8, 12, 4, 2, capacity=capacity)


@pytest.mark.parametrize("top_k", [0, 5, -1])
def test_choices_that_there_are_not(top_k: int):
    with pytest.raises(ValueError, match="of 4 experts: choose 1 to 4"):
        MoE(8, 12, 4, top_k)


def labelled(rank: int, world_size: int) -> tuple[str, set[str]]:
    """What is said of a batch whose labels are shorter on one rank, and what was sent."""
    model = Sequences()
    parallelize(model, mesh(cp=4, device_type="cpu"), Plan(batch="cp:1"))
    tokens = torch.arange(18).view(2, 9)
    with trace() as sent, pytest.raises(ParallelError) as caught:
        model(tokens, tokens[:, : 8 if rank == 2 else 9])
    return str(caught.value), {one.op for one in sent.records}


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(18, 4)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return (self.embed(tokens).sum(-1) - labels).square().mean()


def test_labels_of_one_rank_that_are_shorter():
    found = simulate(4).run(labelled)
    assert len(set(map(str, found))) == 1
    assert "'args[1]': (2, 9) torch.int64 on ranks 0, 1, 3; (2, 8)" in found[0][0]
    assert found[0][1] <= {"all_gather", "all_reduce"}  # the comparison, and no attention
