"""Experts over ranks: one device's routing, losses and gradients; bytes are tokens that move."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_models import EXPERTS, LAYOUTS, ROWS, TOKENS, WIDTH, Net, made, train, whole
from torch import Tensor, nn
from vescale_comm import SimulationError, simulate, trace
from vescale_parallel import MoE, Plan, PlanError, Router, mesh, parallelize
from vescale_parallel._experts import exchange


def on_ranks(function: Callable[..., Any], *args: Any, ranks: int = 4) -> list[Any]:
    return simulate(ranks).run(lambda rank, world_size: function(*args))


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    for one, two in zip(found[1] + found[2], expected[1] + expected[2], strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_norms_and_routing_are_those_of_one_device(layout: str):
    expected = train(made(None))
    for found in on_ranks(lambda: train(made(layout))):
        same(found, expected)


OPTIONS = {
    "sigmoid": {"scores": "sigmoid", "scale": 2.5},
    "one of many": {"top_k": 1, "normalize": False},
    "all of them": {"top_k": EXPERTS},
    "fewer than ranks": {"experts": 3},
    "one expert": {"experts": 1, "top_k": 1},
    "capacity": {"capacity": 0.75},
    "nothing fits": {"capacity": 1e-9},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_routers_and_numbers_of_experts(options: str):
    expected = train(made(None, **OPTIONS[options]), 2)
    if "capacity" in OPTIONS[options]:
        assert all(load[-1] > 0 for load in expected[2]), "some are dropped"
    for layout in ("ep4", "ep2 dp2"):
        for found in on_ranks(lambda at=layout: train(made(at, **OPTIONS[options]), 2)):
            same(found, expected)


def tied(layout: str | None) -> Tensor:
    """What tokens choose of experts that all have the same score, and of two by two."""
    model = made(layout)
    for block in model.blocks:
        with torch.no_grad():
            block.router.weight[1::2] = block.router.weight[::2]
    model(torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 32, torch.zeros(ROWS, TOKENS).long())
    with torch.no_grad():
        for block in model.blocks:
            block.router.weight.zero_()
    model(torch.ones(ROWS, TOKENS).long(), torch.zeros(ROWS, TOKENS).long())
    return torch.stack(model.chosen)


def test_ties_are_broken_as_on_one_device():
    expected = tied(None)
    for layout in ("ep4", "ep2 tp2"):
        assert all(torch.equal(found, expected) for found in on_ranks(tied, layout))


def gradients(layout: str | None, everything_to: int | None) -> dict[str, Tensor]:
    model = made(layout)
    if everything_to is not None:
        for block in model.blocks:
            block.router.balance[everything_to] = 100.0
    tokens = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 32
    model(tokens, tokens.roll(1, 1)).backward()
    return {
        name: torch.zeros(p.shape) if p.grad is None else whole(p.grad)
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("everything_to", [None, 0, EXPERTS - 1])
def test_gradients_are_those_of_one_device(everything_to: int | None):
    expected = gradients(None, everything_to)
    for layout in ("ep4", "ep2 tp2", "ep2 zero3") if everything_to is None else ("ep4",):
        for found in on_ranks(gradients, layout, everything_to):
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def counted(k: int) -> tuple[list[int], Tensor]:
    """Bytes of the exchanges of a step on this rank, and what the tokens of all ranks chose."""
    torch.manual_seed(0)
    layer = MoE(WIDTH, 24, 8, k)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer)
    chosen: list[Tensor] = []
    note = layer.router.register_forward_hook(
        lambda module, args, out: chosen.append(whole(out.chosen))
    )
    x = torch.randn(4, 6, WIDTH)
    parallelize(model, mesh(ep=4, device_type="cpu"), Plan(batch="ep:0", experts="ep"))
    model(x)  # the first two batches are compared between ranks
    note.remove()
    model(x)
    with trace() as sent:
        model(x).to_local().sum().backward()
    assert {one.op for one in sent.records} == {"all_to_all"}
    return [one.bytes for one in sent.records], chosen[0]


@pytest.mark.parametrize("k", [1, 3])
def test_bytes_are_those_of_the_tokens_that_move(k: int):
    for rank, (found, chosen) in enumerate(on_ranks(counted, k)):
        owner = chosen.view(4, -1) // 2  # of each rank's choices: 8 experts on 4 ranks
        leaving = int((owner[rank] != rank).sum())
        arriving = sum(int((owner[one] == rank).sum()) for one in range(4) if one != rank)
        row = WIDTH * 4
        counts = 3 * (2 + 1) * 8  # to three ranks: what comes for their two experts, and a flag
        # Rows to experts, results back; their gradients the same ways the other way.
        expected = [counts, leaving * row, arriving * row, leaving * row, arriving * row]
        assert found == expected


def one_rank_has_no_token(kind: str) -> list[float]:
    layout = None if kind == "one device" else "ep4"
    model = made(layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        tokens = torch.arange(2 * TOKENS).view(2, TOKENS) % 32  # two rows for four ranks
        loss = model(tokens, tokens.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_ranks_without_tokens_take_part():
    expected = one_rank_has_no_token("one device")
    for found in on_ranks(one_rank_has_no_token, "ep4"):
        assert found == pytest.approx(expected, rel=1e-5)


def balanced(layout: str | None) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Steps after each of which routers are balanced by what the whole batch chose."""
    model = made(layout)
    found = train(model, 1)
    for _ in range(3):  # an odd number of steps up or down is none that comes back to zero
        for block, load in zip(model.blocks, model.loads[-2:], strict=True):
            block.router.update_balance(load, 0.01)
        found = train(model, 1)
    return found[0], found[1], [*found[2], *(block.router.balance for block in model.blocks)]


def test_balancing_by_a_bias_is_that_of_one_device():
    expected = balanced(None)
    assert expected[2][-1].all()
    for found in on_ranks(balanced, "ep2 dp2"):
        same(found, expected)


def test_busy_experts_are_chosen_less():
    router = Router(4, 3, 1)
    router.update_balance(torch.tensor([7.0, 1.0, 4.0]), rate=0.5)
    assert router.balance.tolist() == [-0.5, 0.5, 0.0]


def test_frozen_experts_and_no_gradients():
    def run(layout: str | None) -> list[Tensor]:
        model = made(layout)
        for block in model.blocks:
            block.experts.requires_grad_(False)
        tokens = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 32
        with torch.no_grad():
            evaluated = whole(model(tokens, tokens))
        loss = model(tokens, tokens)
        loss.backward()
        assert model.blocks[0].experts.down_proj.grad is None
        return [evaluated, whole(loss), whole(model.embed.weight.grad)]

    expected = run(None)
    for found in on_ranks(run, "ep2 dp2"):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_router_that_is_not_a_number_gives_what_one_device_gives():
    def run(layout: str | None) -> bool:
        model = made(layout)
        with torch.no_grad():
            model.blocks[0].router.weight.fill_(float("nan"))
        loss = model(torch.ones(ROWS, TOKENS).long(), torch.zeros(ROWS, TOKENS).long())
        loss.backward()
        return bool(whole(loss).isnan())

    assert run(None)
    assert all(on_ranks(run, "ep4"))


class Wrong(nn.Module):
    """A router that chooses an expert that there is not, for one token."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.inner = router

    def forward(self, x: Tensor) -> Any:
        found = self.inner(x)
        index = found.chosen.clone()
        index[0, 0] = EXPERTS + 3
        return found._replace(chosen=index)


def wrong_expert(layout: str | None) -> None:
    torch.manual_seed(0)
    model = Net()
    model.blocks[0].router = Wrong(model.blocks[0].router)
    if layout is not None:
        sizes, words = LAYOUTS[layout]
        parallelize(model, mesh(**sizes, device_type="cpu"), Plan(**words))
    model(torch.ones(ROWS, TOKENS).long(), torch.zeros(ROWS, TOKENS).long())


@pytest.mark.parametrize("dropped", [False, True])
def test_choices_are_counted_alike_on_the_host_and_without_waiting(dropped: bool):
    choices = torch.randint(0, EXPERTS + dropped, (57,))
    found = exchange._added_up(choices, EXPERTS)
    assert torch.equal(found, exchange._counted(choices, EXPERTS))
    assert found.sum() == (choices < EXPERTS).sum()


def test_an_expert_that_there_is_not_is_an_error_on_every_rank():
    with pytest.raises(Exception, match="there are 6, from 0"):
        wrong_expert(None)
    with pytest.raises(SimulationError) as caught:
        on_ranks(wrong_expert, "ep4")
    assert [f"{one}".count("there are 6, from 0") for one in caught.value.errors.values()] == [
        1
    ] * 4


def test_activation_checkpointing_copies_and_existing_optimizers():
    def run(layout: str | None) -> list[float]:
        torch.manual_seed(0)
        model = Net(shared=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if layout is not None:
            sizes, words = LAYOUTS[layout]
            plan = Plan(**words, checkpoint="full")
            parallelize(model, mesh(**sizes, device_type="cpu"), plan)
        tokens = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 32
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens, tokens.roll(1, 1)).backward()
            optimizer.step()
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        return [twin(tokens, tokens).item(), model(tokens, tokens).item()]

    expected = run(None)
    for found in on_ranks(run, "ep2 dp2"):
        assert found == pytest.approx(expected, rel=1e-5)


WRONG_PLANS = [
    ({"experts": ""}, "cannot be read"),
    ({"experts": 3}, "cannot be read"),
    ({"experts": "ep, ep"}, "cannot be read"),
    ({"experts": {}}, "says nothing"),
    ({"experts": {"*.expert": "ep"}}, "matches no module"),
    ({"experts": {"head": "ep"}}, "its forward does not take"),
    ({"experts": "expert"}, "no axis 'expert'"),
    ({"experts": "ep", "deterministic": "dp-invariant", "batch": "dp:0, ep:0"}, "logical shard "),
]


@pytest.mark.parametrize(("words", "message"), WRONG_PLANS, ids=str)
def test_plans_that_do_not_fit_say_why(words: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=message):
        Plan(**words).check(Net(), {"dp": 2, "ep": 2})


def test_a_model_without_experts_says_so():
    with pytest.raises(PlanError, match="no module of the model says that it holds"):
        Plan(experts="ep").check(nn.Linear(2, 2), {"ep": 2})


def test_explain_shows_uneven_shares(capsys: pytest.CaptureFixture[str]):
    Plan(experts="ep", batch="ep:0").explain(Net(), {"ep": 4})
    assert "0 to 2" in capsys.readouterr().out


def test_one_dim_that_zero_would_store_in_another_order_is_refused():
    words = {"parameters": {"head.weight": "dp:0, tp:0", "*": "replicate"}}
    plan = Plan(**words, zero={"head.weight": 0, "*": 3})
    with pytest.raises(PlanError, match="which a plan with zero over 'dp' cannot store"):
        plan.check(Net(), {"dp": 2, "tp": 2})
    plan.check(Net(), {"tp": 2, "dp": 2})  # `dp` is the last axis there, as where it is stored
