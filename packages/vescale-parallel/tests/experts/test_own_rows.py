"""Experts that no axis shares: each rank computes its own tokens, and sends nothing for it.

In every plan, for modules that say by themselves what they are, looped and grouped: one device's
losses and gradients, and of collectives only those of the gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vescale_parallel as vp
from expert_models import whole
from torch import Tensor, nn
from torch.nn import functional as F
from vescale_comm import simulate, trace

EXPERTS, WIDTH, INNER = 4, 8, 12


class Looped(nn.Module):
    """Stacks of experts, with the marks by which such modules say how they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.has_gate = self.is_concatenated = True
        self.has_bias = self.is_transposed = False
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        chosen = F.one_hot(index, EXPERTS).permute(2, 1, 0)
        for expert in chosen.sum((1, 2)).nonzero().flatten():
            slot, token = torch.where(chosen[expert])
            gate, up = F.linear(tokens[token], self.gate_up_proj[expert]).chunk(2, -1)
            said = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out.index_add_(0, token, said * weights[token, slot, None])
        return out


class Sorted(Looped):
    """The same in one product for each stack, of rows in the order of their experts."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        k = index.shape[1]
        experts, order = index.flatten().sort(stable=True)
        rows = tokens[order // k].unsqueeze(1)
        gate, up = (rows @ self.gate_up_proj[experts].mT).chunk(2, -1)
        said = ((F.silu(gate) * up) @ self.down_proj[experts].mT).squeeze(1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return (said[back].view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Dropping(Looped):
    """Which draws numbers: it stays gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)


class Net(nn.Module):
    """A router, its loss over all tokens, experts, and a shared one."""

    def __init__(self, kind: type[Looped]) -> None:
        super().__init__()
        self.embed, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.shared = kind(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        weights, index = scores.topk(2)
        share = F.one_hot(index, EXPERTS).float().mean((0, 1))
        out = self.experts(tokens, index, weights) + self.shared(tokens)
        return out.square().mean() + (share * scores.mean(0)).sum()


PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}),
    "dp4, a rank without rows": ({"dp": 4}, {}),
    "dp2 zero3": ({"dp": 2}, {"zero": 3}),
    "a unit of their own": ({"dp": 2}, {"zero": vp.Zero(3, units="experts")}),
    "dp2 tp2": (
        {"dp": 2, "tp": 2},
        {"parameters": {"*.gate_up_proj": "tp:1", "*.down_proj": "tp:2", "*": "replicate"}},
    ),
    "tp2, by experts": (
        {"dp": 1, "tp": 2},
        {"parameters": {"experts.*": "tp:0", "*": "replicate"}},
    ),
    "others over an axis": ({"dp": 2, "ep": 2}, {"experts": {"other": "ep"}}),
    "recomputed": ({"dp": 2}, {"checkpoint": {"experts": "full"}}),
    "logical shards": ({"dp": 2}, {"deterministic": vp.Invariant(3)}),
    "static": ({"dp": 2}, {"static": True}),
}


def made(kind: type[Looped], plan: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = Net(kind)
    if plan is not None:
        sizes, words = PLANS[plan]
        options = {name: words[name] for name in {"static"} & {*words}}
        words = {name: one for name, one in words.items() if name not in options}
        if "other" in str(words):
            model.other = Looped()
        where = vp.mesh(**sizes | {"dp": -1}, device_type="cpu")
        vp.parallelize(model, where, vp.Plan(**words), **options)
    return model


def steps(kind: type[Looped], plan: str | None) -> list[Tensor]:
    """Losses, and the parameters after some steps."""
    model = made(kind, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, data = [], torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(3, 5, WIDTH, generator=data)
        if plan == "logical shards":
            loss = vp.forward_backward(model, x)
        else:
            loss = model(x)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(whole(loss))
    return found + [whole(p) for n, p in model.named_parameters() if not n.startswith("other")]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [Looped, Sorted])
def test_steps_are_those_of_one_device(kind: type[Looped], plan: str):
    wanted = steps(kind, None)
    if plan == "logical shards":
        wanted = simulate(1).run(lambda rank, size: steps(kind, plan))[0]
    ranks = torch.Size(PLANS[plan][0].values()).numel()
    for found in simulate(ranks).run(lambda rank, size: steps(kind, plan)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def sent(kind: type[Looped], plan: str) -> tuple[set[str], dict[str, int]]:
    """Operations of a forward, and bytes by operation of a backward."""
    model = made(kind, plan)
    x = torch.randn(4, 5, WIDTH)
    for _ in range(2):  # the first batches are compared between ranks
        model(x).backward()
        model.zero_grad()
    with trace() as forward:
        loss = model.experts(*inputs(model, x)).square().mean()
    with trace() as backward:
        loss.backward()
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad + 0
    by_op: dict[str, int] = {}
    for one in backward.records:
        by_op[one.op] = by_op.get(one.op, 0) + one.bytes
    return {one.op for one in forward.records}, by_op


def inputs(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens = vp.distribute_batch(model, x).flatten(0, 1)
    weights, index = model.router(tokens).softmax(-1).topk(2)
    return tokens, index, weights


@pytest.mark.parametrize("kind", [Looped, Sorted])
def test_they_send_nothing_but_their_gradients(kind: type[Looped]):
    model = Net(kind)
    trained = [*model.router.parameters(), *model.experts.parameters()]
    gradients = sum(one.numel() for one in trained) * 4
    for forward, backward in simulate(2).run(lambda rank, size: sent(kind, "dp2")):
        assert forward == set()
        assert backward == {"all_reduce": gradients}


class Promoting(Looped):
    """Which drops choices, may drop all of a rank, and returns another dtype; it counts calls."""

    calls = 0

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        out = torch.zeros_like(tokens, dtype=torch.float64)
        for expert in range(EXPERTS):
            token, slot = (index == expert).nonzero().unbind(1)
            if len(token):
                gate, up = F.linear(tokens[token], self.gate_up_proj[expert]).chunk(2, -1)
                said = F.linear(gate * up, self.down_proj[expert]).double()
                out = out.index_add(0, token, said * weights[token, slot, None])
        return out


def dropped(plan: str | None, tokens: int) -> list[Tensor]:
    model = made(Promoting, plan)
    drop, found = torch.arange(tokens).unsqueeze(1) >= tokens // 2, []
    for _ in range(4):  # the first two calls are compared between ranks
        x = torch.linspace(-1, 1, tokens * WIDTH).view(tokens, WIDTH)
        if plan is not None:
            x, drop = vp.distribute_batch(model, x), vp.distribute_batch(model, drop)
        weights, index = model.router(x).softmax(-1).topk(2)
        loss = model.experts(x, index.masked_fill(drop, EXPERTS), weights).square().sum()
        loss.backward()
        drop = whole(drop)
        found.append(whole(loss))
    assert model.experts.calls == 4
    used = (model.router.weight, *model.experts.parameters())
    return found + [whole(one.grad) for one in used]


@pytest.mark.parametrize("tokens", [4, 3])
def test_a_rank_whose_choices_are_dropped(tokens: int):
    wanted = dropped(None, tokens)
    plan = "dp4, a rank without rows"
    for found in simulate(4).run(lambda rank, size: dropped(plan, tokens)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Counting(Looped):
    """Which may count tokens in its buffer: they are all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.load = nn.Buffer(torch.zeros(EXPERTS))


@pytest.mark.parametrize("kind", [Dropping, Counting])
def test_what_looks_at_all_tokens_stays_as_it_is(kind: type[Looped]):
    assert vp.Plan().check(Net(kind), {"dp": 2}).experts == ()


def test_what_draws_is_not_shared():
    assert "experts" in str(vp.Plan().check(Net(Looped), {"dp": 2}).experts)
    with pytest.raises(vp.PlanError, match="Drop out before or behind"):
        vp.Plan(experts="dp").check(Net(Dropping), {"dp": 2})


class Delta(nn.Module):
    """An adapter that is made in a call, of a tensor that is no parameter of it."""

    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, stack: Tensor) -> Tensor:
        return stack + self.delta


def adapted(plan: str | None) -> list[Tensor]:
    model = made(Looped, plan)
    delta = model.router.weight.sum()
    nn.utils.parametrize.register_parametrization(model.experts, "gate_up_proj", Delta(delta))
    loss = model(torch.linspace(-1, 1, 4 * 5 * WIDTH).view(4, 5, WIDTH))
    loss.backward()
    return [whole(loss), *(whole(one.grad) for one in model.parameters())]


def test_adapters_of_a_call():
    wanted = adapted(None)
    for found in simulate(2).run(lambda rank, size: adapted("dp2")):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)

    def refused(rank: int, size: int) -> None:
        with pytest.raises(vp.ParallelError, match="Adapt the model before parallelize"):
            adapted("dp2 tp2")

    simulate(4).run(refused)
