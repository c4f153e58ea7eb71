"""Modules that a plan names as experts are tried first: what ranks could not share is refused.

A row that leaves for another rank is computed by a part of the module's experts, alone and with a
weight of one. Modules of which that is true train as on one device; all others are an error on
every rank, before anything is changed, where ranks had computed other numbers in silence.
"""

from typing import Any

import pytest
import torch
from expert_models import whole
from torch import Tensor, nn
from torch.nn import functional as F
from vescale_comm import simulate
from vescale_parallel import Plan, PlanError, Zero, deferred, mesh, parallelize

EXPERTS, WIDTH = 4, 8


class Loop(nn.Module):
    """Experts in a loop, as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12))
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH))

    def one(self, x: Tensor, expert: int) -> Tensor:
        return F.gelu(x @ self.up[expert]) @ self.down[expert]

    def here(self) -> range:
        return range(self.num_experts)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in self.here():
            token, choice = (index == expert).nonzero(as_tuple=True)
            said = self.one(x[token], expert) * weights[token, choice, None]
            out.index_add_(0, token, said)
        return out


class Normed(Loop):
    """With parameters that all experts share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bias = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(WIDTH))

    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(self.norm(x), expert) + self.bias


class WeightsFirst(Loop):
    def forward(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        return super().forward(x, index, weights)


class Scaled(Loop):
    """A number for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = self.numbers(torch.arange(1.0, EXPERTS + 1))

    def numbers(self, values: Tensor) -> Any:
        return nn.Parameter(values)

    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x, expert) * self.scale[expert]


class InAList(Scaled):
    def numbers(self, values: Tensor) -> Any:
        return values.tolist()


class InABuffer(Scaled):
    def numbers(self, values: Tensor) -> Any:
        return nn.Buffer(values)


class InParameters(Scaled):
    def numbers(self, values: Tensor) -> Any:
        return nn.ParameterList(nn.Parameter(one.clone()) for one in values)


class AsStack(Scaled):
    """Which ranks can share."""

    def numbers(self, values: Tensor) -> Any:
        return nn.Parameter(values.view(-1, 1))


class Normalised(Loop):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, index, weights / weights.sum(-1, keepdim=True))


class OfWeighed(Loop):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x * weights.mean(1, keepdim=True), index, weights)


class Residual(Loop):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return x + super().forward(x, index, weights)


class OfAllRows(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x - x.mean(0), expert)


class Dropped(Loop):
    def one(self, x: Tensor, expert: int) -> Tensor:
        return F.dropout(super().one(x, expert), 0.3, self.training)


class Counting(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.seen += index.numel()
        return super().forward(x, index, weights)


class OwnName(Loop):
    """Counts its experts under a name that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.calls = EXPERTS, [0]

    def here(self) -> range:
        self.calls[0] += 1  # of the trial, on a copy
        return range(self.count)


class Adapter(nn.Module):
    """A stack, and a small change of it: base + a b, by experts."""

    def __init__(self, base: nn.Parameter | None, inner: int, outer: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(EXPERTS, inner, 2))
        self.b = nn.Parameter(torch.randn(EXPERTS, 2, outer))

    def forward(self, base: Any = None) -> Tensor:
        return (self.base if base is None else base) + self.a @ self.b

    def __getitem__(self, expert: int) -> Tensor:
        return self()[expert]


class Adapted(Loop):
    """An adapter around one of two stacks."""

    def __init__(self) -> None:
        super().__init__()
        base = self.up
        del self.up
        self.up = Adapter(base, WIDTH, 12)


class AllAdapted(Adapted):
    """No stack is the module's own; beside them a layer of as many rows as there are experts."""

    def __init__(self) -> None:
        super().__init__()
        base = self.down
        del self.down
        self.down = Adapter(base, 12, WIDTH)
        self.mix = nn.Linear(WIDTH, EXPERTS)

    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x + self.mix(x).sum(-1, keepdim=True), expert)


class Unnumbered(AllAdapted):
    """That says nowhere how many experts it has."""

    def __init__(self) -> None:
        super().__init__()
        del self.num_experts

    def here(self) -> range:
        return range(len(self.up.a))


class OneAdapter(Adapted):
    """Under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.up
        self.register_module("none", None)

    def one(self, x: Tensor, expert: int) -> Tensor:
        return super().one(x, expert) + super().one(x, expert) * self.again.a[expert].sum()


class Parametrized(Loop):
    def __init__(self) -> None:
        super().__init__()
        adapter = Adapter(None, WIDTH, 12)
        nn.utils.parametrize.register_parametrization(self, "up", adapter)


class InADict(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ParameterDict({"up": self.up, "down": self.down})
        del self.up, self.down
        self.adapters = nn.ModuleList([Adapter(None, WIDTH, 12), Adapter(None, 12, WIDTH)])

    def one(self, x: Tensor, expert: int) -> Tensor:
        up = self.adapters[0](self.stacks["up"])[expert]
        return F.gelu(x @ up) @ self.adapters[1](self.stacks["down"])[expert]


INSIDE = [Adapted, AllAdapted, Unnumbered, OneAdapter, Parametrized, InADict]


class Net(nn.Module):
    def __init__(self, kind: type[Loop]) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), kind()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        if isinstance(self.experts, WeightsFirst):
            weights, index = index, weights
        return (x + self.experts(x, index, weights)).square().mean()


def step(kind: type[Loop], ranks: int, late: bool = False) -> Any:
    torch.manual_seed(0)
    if late:
        with deferred():
            model = Net(kind)
    else:
        model = Net(kind)
    if ranks > 1:
        here = torch.get_rng_state()
        plan = Plan(batch="ep:0", experts={"experts": "ep"})
        try:
            parallelize(model, mesh(ep=ranks, device_type="cpu"), plan)
        except PlanError as error:
            assert torch.equal(torch.get_rng_state(), here)
            return str(error), getattr(model.experts, "calls", [0])
    torch.manual_seed(1)
    loss = model(torch.randn(9, WIDTH))
    loss.backward()
    return [whole(loss), *(whole(one.grad) for one in model.parameters())]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [Loop, Normed, WeightsFirst, AsStack, *INSIDE])
def test_what_ranks_can_share(kind: type[Loop], late: bool):
    wanted = step(kind, 1)
    # Two experts a rank, and one rank with one of four and one with none.
    for ranks in (2, 3):
        for found in simulate(ranks).run(lambda rank, size: step(kind, size, late)):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("words", [{"zero": 3}, {"zero": 1}, {"experts": {"experts": "ep, dp"}}])
@pytest.mark.parametrize("kind", [Adapted, Parametrized, InADict])
def test_stacks_inside_in_other_layouts(kind: type[Loop], words: dict[str, Any]):
    def losses(ranks: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net(kind)
        if ranks > 1:
            usual: dict[str, Any] = {"batch": "dp:0, ep:0", "experts": {"experts": "ep"}} | words
            plan = Plan(**usual | {"zero": Zero(usual.get("zero", 0), units="experts")})
            parallelize(model, mesh(dp=2, ep=2, device_type="cpu"), plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(torch.randn(9, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [whole(one) for one in model.parameters()]

    wanted = losses(1)
    for found in simulate(4).run(lambda rank, size: losses(size)):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_units_within_experts_are_told():
    plan = Plan(zero=3, experts={"experts": "ep"}, batch="ep:0, dp:0")
    with pytest.raises(PlanError, match=r"'experts.adapters.0', .* Name units around"):
        plan.check(Net(InADict), {"dp": 2, "ep": 2})


WORDS = {
    **dict.fromkeys(
        [Scaled, InAList, InABuffer, InParameters, Normalised, OfWeighed, Residual, OfAllRows],
        "is not the weighted sum of what each expert says of a token by itself",
    ),
    Dropped: "it draws random numbers",
    Counting: "it writes to its buffer 'seen'",
    OwnName: "with a part of its experts it raises IndexError",
}


@pytest.mark.parametrize("kind", WORDS)
def test_what_they_cannot_share(kind: type[Loop]):
    for late in (False, True):
        for found, calls in simulate(2).run(lambda rank, size, at=late: step(kind, size, at)):
            assert WORDS[kind] in found
            assert f"'experts', a {kind.__name__}" in found
            assert calls == [0]
