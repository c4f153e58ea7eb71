"""Functions and modules of rows: one device's numbers, nothing sent, and what is proven of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import vescale_parallel as vp
from torch import Tensor, nn
from vescale_comm import simulate, trace
from vescale_dtensor import DTensor
from vescale_parallel import check_local_rows, local_rows

WIDTH = 6


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class Said(NamedTuple):
    out: Tensor
    parts: dict[str, Tensor]


@local_rows(shared=("table",))
def packed(x: Tensor, mask: Tensor, *, table: Tensor, scale: Any = None) -> Said:
    """Rows of a mask, packed, changed and put back; and which they were."""
    kept = mask.nonzero().flatten()
    order = x[kept, 0].argsort()
    out = torch.zeros_like(x)
    out.index_add_(0, kept[order], (x[kept[order]] @ table).relu() * scale)
    return Said(out, {"kept": mask.long()})


class Method(nn.Module):
    """A loop over experts that are layers, of which some rank needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in index.unique().tolist():
            rows = (index == number).nonzero().flatten()
            out[rows] = self.layers[number](x[rows])
        return out


class Declared(Method):
    forward = local_rows(Method.forward)


class Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Declared) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.routed = kind()

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        x = self.first(x)
        said = packed(x, x[:, 1] > 0, table=self.table, scale=self.scale)
        assert said.parts["kept"].shape == (len(x),)
        return (self.routed(said.out, index) + said.out).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    # Sorted, so that a rank's rows need some of the layers only.
    return torch.randn(7, WIDTH, generator=made), torch.tensor([0, 0, 0, 1, 1, 2, 2])


PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}),
    "a rank without rows": ({"dp": 6}, {}),
    "zero3": ({"dp": 2}, {"zero": vp.Zero(3, units="routed")}),
    "tp": ({"dp": 2, "tp": 2}, {"parameters": {"table": "tp:0", "*": "replicate"}}),
    "whole": ({"tp": 2}, {}),
    "recomputed": ({"dp": 2}, {"checkpoint": {"routed": "full"}}),
    "static": ({"dp": 2}, {}),
}


def steps(kind: type[nn.Module], plan: str | None, **words: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net(kind)
    if plan is not None:
        sizes, more = PLANS[plan]
        where = vp.mesh(**sizes, device_type="cpu")
        vp.parallelize(model, where, vp.Plan(**more, **words), static=plan == "static")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(*batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss))
    return [*losses, *(whole(one) for one in model.parameters())]


@pytest.mark.parametrize("plan", PLANS)
def test_steps_are_those_of_one_device(plan: str):
    ranks = torch.Size(PLANS[plan][0].values()).numel()
    wanted = steps(Method, None)
    for kind, words in ((Declared, {}), (Method, {"local_rows": "routed"})):
        for found in simulate(ranks).run(lambda rank, size, k=kind, w=words: steps(k, plan, **w)):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def sent(kind: type[nn.Module], **words: Any) -> tuple[set[str], set[str]]:
    model = Net(kind)
    vp.parallelize(model, vp.mesh(dp=2, device_type="cpu"), vp.Plan(**words))
    for _ in range(2):  # the first batches are compared, and the first results
        model(*batch()).backward()
        model.zero_grad()
    with trace() as forward:
        loss = model(*batch())
    with trace() as backward:
        loss.backward()
        for p in model.parameters():
            p.grad = p.grad + 0
    return {one.op for one in forward.records}, {one.op for one in backward.records}


def test_nothing_is_gathered():
    assert simulate(2).run(lambda rank, size: sent(Declared)) == [(set(), {"all_reduce"})] * 2
    planned = simulate(2).run(lambda rank, size: sent(Method, local_rows="rou*"))
    assert planned == [(set(), {"all_reduce"})] * 2
    # Such operators gather in a module of which nothing is said.
    assert "all_gather" in simulate(2).run(lambda rank, size: sent(Method))[0][0]


def test_plain_tensors_find_the_function_itself():
    x, table = torch.randn(4, WIDTH), torch.eye(WIDTH)
    said = packed(x, x[:, 0] > 0, table=table, scale=2.0)
    torch.testing.assert_close(said.out, x.relu() * (x[:, :1] > 0) * 2)


class Bad(nn.Module):
    """A function of all rows, said to be one of rows."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen = nn.Buffer(torch.zeros(()))
        self.function = local_rows(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).sum()


def capacity(x: Tensor) -> Tensor:
    """Takes half of the rows, those that come first."""
    return torch.cat([x[: len(x) // 2], torch.zeros_like(x[len(x) // 2 :])])


def experts_choose(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    best = x[:, 0].topk(min(2, len(x))).indices
    out[best] = x[best]
    return out


class Straight(torch.autograd.Function):
    """Nothing in forward; of its gradient the mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0) if len(gradient) else gradient


NOT_OF_ROWS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "mean": (lambda x: x - x.mean(0), "result is another in parts of"),
    "count": (lambda x: x / len(x), "result is another in parts of"),
    "order": (lambda x: x * torch.arange(len(x)).unsqueeze(1), "result is another in parts of"),
    "capacity": (capacity, "result is another in parts of"),
    "experts that choose": (experts_choose, "result is another in parts of"),
    "gradient": (Straight.apply, "Results agree, and the gradient of 'x' is another"),
    "dropout": (lambda x: nn.functional.dropout(x, 0.5), "it draws random numbers"),
    "a sum": (lambda x: x.sum(0), "Return what is of each row"),
    "no tensor": (lambda x: None, "no tensor"),
}


@pytest.mark.parametrize("name", NOT_OF_ROWS)
def test_what_is_not_of_rows_is_told(name: str):
    function, words = NOT_OF_ROWS[name]

    def wrapped(x: Tensor) -> Any:
        return function(x)

    with pytest.raises(vp.ParallelError, match=words):
        check_local_rows(Bad(wrapped), torch.randn(5, WIDTH))


class Counting(Method):
    """A module that writes to a buffer, or an attribute, and counts its calls."""

    number = 0

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.calls, self.kept = nn.Buffer(torch.zeros(())), kept

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        self.number += 1
        if self.kept == "buffer":
            self.calls += len(x)
        elif self.kept == "new buffer":
            self.calls = self.calls + len(x)
        elif self.kept == "argument":
            x.mul_(2)
        elif self.kept == "attribute":
            self.seen = [x.sum(1)]
        return super().forward(x, index)


KEPT = {
    "buffer": "it writes to",
    "new buffer": "it writes to",
    "argument": "it writes to its arguments",
    "attribute": "it keeps tensors in attributes",
}


@pytest.mark.parametrize("kept", KEPT)
def test_what_is_left_behind_is_told(kept: str):
    model = Net(lambda: Counting(kept))
    calls = model.routed.calls
    with pytest.raises(vp.ParallelError, match=rf"'routed' \(Counting\): {KEPT[kept]}"):
        check_local_rows(model, batch(), modules="routed")
    assert model.routed.calls is calls
    assert calls == 0
    assert not {"forward", "seen"} & {*vars(model.routed)}


def kept_on_ranks(rank: int, size: int) -> None:
    where = vp.mesh(dp=2, device_type="cpu")
    model = vp.parallelize(Net(lambda: Counting("")), where, vp.Plan(local_rows="routed"))
    # A copy computes on the same mesh, and counts by itself.
    for one in (model, copy.deepcopy(model)):
        one(*batch())
        assert one.routed.number == 1
    model.routed.kept = "attribute"
    with pytest.raises(vp.ParallelError, match="it keeps tensors in attributes"):
        model(*batch())


def test_attributes_are_those_of_the_module():
    simulate(2).run(kept_on_ranks)


def test_what_is_of_rows_is_proven():
    model = Net(Method)
    before = torch.get_rng_state()
    found = check_local_rows(model, batch(), modules="routed")
    assert found == {"packed": 1, "'routed' (Method)": 1}
    assert torch.equal(torch.get_rng_state(), before)
    # One within the other is proven with it.
    within = check_local_rows(Net(), batch(), modules="routed")
    assert within == {"packed": 1, "'routed' (Declared)": 1}
    assert all(p.grad is None for p in model.parameters())

    def on_a_rank(rank: int, size: int) -> dict[str, int]:
        torch.manual_seed(0)
        shared = Net()
        vp.parallelize(shared, vp.mesh(dp=2, device_type="cpu"), vp.Plan(zero=2))
        return check_local_rows(shared, batch())

    for one in simulate(2).run(on_a_rank):
        assert one == {"packed": 1, "Method.forward": 1}


def test_nothing_to_prove():
    with pytest.raises(vp.ParallelError, match="has called no function of local_rows"):
        check_local_rows(nn.Linear(2, 2), torch.ones(3, 2))
    with pytest.raises(vp.ParallelError, match="match no module"):
        check_local_rows(nn.Linear(2, 2), torch.ones(3, 2), modules="moe")


def other_rows(rank: int, size: int) -> str:
    x = DTensor.from_local(torch.ones(2, 3), vp.mesh(dp=2, device_type="cpu"), shape=(2, 3))
    with pytest.raises(vp.ParallelError) as caught:
        local_rows(lambda a, b: a)(x, torch.ones(3))
    return str(caught.value)


def test_arguments_of_other_rows():
    for one in simulate(2).run(other_rows):
        assert "'a' has 2 rows, and 'b' of shapes [(3,)] have others" in one
    with pytest.raises(ValueError, match="has no arguments"):
        local_rows(packed, shared=("tables",))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = nn.Sequential(nn.BatchNorm1d(4), vp.MoE(4, 4, 2, 1))
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"local_rows": "moo"}, "matches no module"),
    ({"local_rows": "moe"}, "'moe.0' take statistics of all rows"),
    ({"local_rows": "moe", "experts": "dp"}, "'moe.1.experts' are shared by ranks"),
    ({"local_rows": "parts", "zero": 3}, "Name units around it"),
    ({"local_rows": "{"}, "is never closed"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=str)
def test_plans_that_do_not_fit_say_why(words: dict[str, Any], message: str):
    with pytest.raises(vp.PlanError, match=message):
        vp.Plan(**words).check(Normed(), {"dp": 2})


def test_a_plan_keeps_its_words(capsys: pytest.CaptureFixture[str]):
    plan = vp.Plan(local_rows=["routed"])
    assert vp.Plan.from_json(plan.to_json()) == plan == vp.Plan.from_toml(plan.to_toml())
    plan.explain(Net(), {"dp": 2})
    assert "computes its own rows of 'routed'" in capsys.readouterr().out
