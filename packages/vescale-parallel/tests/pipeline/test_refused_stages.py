"""What cannot run in stages is refused with words, on every rank, and nobody is left waiting."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_runs import failures_of, require_gradients, staged, step_both
from torch import Tensor, nn
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_dtensor import DTensor
from vescale_parallel import Plan, PlanError, forward_backward
from vescale_parallel._pipeline.run import trial_run

PIPELINE: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2}


class Block(nn.Module):
    """A linear layer that fails where `fails` says so, in the `when`-th call."""

    def __init__(self, fails: bool = False, when: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fails, self.when, self.calls = fails, when, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails and self.calls == self.when:
            raise ValueError("a block does not like this")
        self.inner = self.layer(x)
        return self.inner.tanh()


class Model(nn.Module):
    """Embedding, blocks, head; `through` may change what happens between blocks."""

    def __init__(self, *, fails: int = -1, when: int = 1, through: Any = None) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block(i == fails, when) for i in range(4))
        self.head = nn.Linear(4, 1)
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embed(x)
        for at, block in enumerate(self.blocks):
            x = block(x)
            if self.through is not None:
                x = self.through(self, at, x, first)
        return self.head(x).square().mean()


def reads(model: Any, at: int, x: Tensor, first: Tensor) -> Tensor:
    return x if x.sum() > -1e9 else first


def adds(model: Any, at: int, x: Tensor, first: Tensor) -> Tensor:
    return x + first if at == 2 else x


def late_embed(model: Any, at: int, x: Tensor, first: Tensor) -> Tensor:
    return x + model.embed.weight.sum() if at == 3 else x


def late_row(model: Any, at: int, x: Tensor, first: Tensor) -> Tensor:
    return x + model.embed.weight.T[0, :1] if at == 3 else x


def asks(model: Any, at: int, x: Tensor, first: Tensor) -> Tensor:
    # Of a parameter of another stage, but not for its values.
    weight = model.embed.weight
    return x.to(weight.device, weight.dtype) * len(weight) / weight.size(0) if at == 3 else x


def again(model: Any, at: int, x: Tensor, first: Tensor) -> Tensor:
    return model.blocks[0](x) if at == 1 else x


def leaks(model: Any, at: int, x: Tensor, first: Tensor) -> Tensor:
    # As an auxiliary loss: on this stage that of its own blocks only.
    return x + model.blocks[at].inner.square().mean() if at == 3 else x


def hides(model: Any, at: int, x: Any, first: Tensor) -> Tensor:
    # By methods of Python, which no torch function mode sees.
    if at != 1:
        return x
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements)


def collects(model: Any, at: int, x: Tensor, first: Tensor) -> Tensor:
    # As a list of router logits that blocks fill: empty where they do not run.
    return x + [b.layer.bias for b in model.blocks if b.calls][3].sum() if at == 3 else x


def is_content(model: Any, at: int, x: Tensor, first: Tensor) -> Tensor:
    # As the auxiliary losses of the first blocks, none of which run on the last stage.
    if at != 3:
        return x
    return x + sum(b.inner.square().mean() for b in model.blocks[:2] if hasattr(b, "inner"))


class Beside(nn.Module):
    """Blocks that return, and are given, a tensor of any kind beside another."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BesideBlock(make) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        found: tuple[Tensor, ...] = (x,)
        for block in self.blocks:
            found = block(*found)
        return found[0].square().mean()


class BesideBlock(nn.Module):
    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(3, 3), make

    def forward(self, x: Tensor, beside: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.layer(x).tanh(), self.make()


NOT_DENSE: dict[str, Callable[[], Tensor]] = {
    "torch.sparse_coo": lambda: torch.eye(2).to_sparse(),
    "torch.sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "meta": lambda: torch.ones(3, device="meta"),
    "torch._mkldnn": lambda: torch.ones(3).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*(prototype|beta|deprecated):UserWarning")
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_tensors_that_do_not_lie_in_memory_are_refused(kind: str):
    """Three of them left the next stage waiting for what could not be sent."""

    def on_a_rank(rank: int, world_size: int) -> str:
        model = Beside(NOT_DENSE[kind])
        staged(model, {"pp": 2}, **PIPELINE)
        return failures_of(lambda: forward_backward(model, torch.randn(4, 3)))

    for told in simulate(2)(on_a_rank):
        assert f"returns a tensor that is {kind}: between stages" in told, told


def test_an_answer_that_fails_is_told_to_the_stage_that_waits(monkeypatch: pytest.MonkeyPatch):
    """Whatever goes wrong where a stage hands over: the next one waits for an answer."""

    def on_a_rank(rank: int, world_size: int) -> str:
        torch.manual_seed(0)
        model = Model()
        staged(model, {"pp": 2}, **PIPELINE)
        return failures_of(lambda: forward_backward(model, torch.randn(4, 3)))

    def fails(*given: Any) -> Any:
        raise RuntimeError("no way to hand this over")

    monkeypatch.setattr(trial_run, "handed_over", fails)
    for told in simulate(2)(on_a_rank):
        assert "no way to hand this over" in told, told


CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "first stage": ({"fails": 0}, 4, "a block does not like this"),
    "last stage": ({"fails": 3}, 4, "a block does not like this"),
    # The trial run takes back what it has counted: in the second microbatch.
    "first stage in the step": ({"fails": 1, "when": 2}, 4, "a block does not like this"),
    "last stage in the step": ({"fails": 2, "when": 2}, 4, "a block does not like this"),
    "reads a value": ({"through": reads}, 4, "reads a value that another stage"),
    "uses what is not passed on": ({"through": adds}, 4, "takes values that only other stages"),
    "computes with another stage's weight": ({"through": late_embed}, 4, "everywhere='embed'"),
    "reads a row of another stage's weight": ({"through": late_row}, 4, "everywhere='embed'"),
    "hides a value": ({"through": hides}, 4, "no numbers"),
    "uses what a block did not return": ({"through": leaks}, 4, "is not what that returns"),
    "takes what it finds of what blocks leave": (
        {"through": is_content},
        4,
        "takes values that only other stages have",
    ),
    "looks for what other blocks leave": (
        {"through": collects},
        4,
        "the model failed on stage 1, outside of its blocks: IndexError",
    ),
    "calls a block twice": ({"through": again}, 4, "where 'blocks.2' is due"),
    "no rows": ({}, 0, "0 rows in args[0]"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_hears_what_is_wrong(case: str):
    options, rows, words = CASES[case]

    def on_a_rank(rank: int, world_size: int) -> str:
        torch.manual_seed(0)
        model = Model(**options)
        staged(model, sizes, **PIPELINE)
        return failures_of(lambda: forward_backward(model, torch.randn(rows, 3)))

    # Where a stage lies on one rank its tensors are plain ones.
    sizes = {"pp": 2, "dp": 2} if case == "hides a value" else {"pp": 2}
    for told in simulate(torch.Size(sizes.values()).numel())(on_a_rank):
        assert words in told, told


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("where", [(0, 1), (1,)])
def test_what_came_late_is_named(where: tuple[int, ...], steps: int):
    def on_a_rank(rank: int, world_size: int) -> str:
        torch.manual_seed(0)
        model = Model()
        staged(model, {"pp": 2}, **PIPELINE)
        for _ in range(steps):
            forward_backward(model, torch.ones(4, 3))
        if rank in where:
            model.head = nn.Linear(4, 1)
        return failures_of(lambda: forward_backward(model, torch.ones(4, 3)))

    words = "'head.weight', 'head.bias' came after parallelize"
    if where == (1,):
        words = "came after parallelize': not there on rank 0; 'head.weight', 'head.bias' on rank 1"
    for told in simulate(2)(on_a_rank):
        assert words in told, told


def test_ranks_that_call_it_otherwise_are_told():
    def on_a_rank(rank: int, world_size: int) -> str:
        torch.manual_seed(0)
        model = Model()
        staged(model, {"pp": 2}, **PIPELINE)
        for _ in range(3):
            forward_backward(model, torch.ones(4, 3))
        return failures_of(lambda: forward_backward(model, torch.ones(4 + 2 * rank, 3)))

    for told in simulate(2)(on_a_rank):
        assert "tensor 'args[0]': (4, 3) torch.float32 on rank 0; (6, 3)" in told


@on_ranks(2, simulated=True)
def test_what_is_trained_may_change():
    torch.manual_seed(0)
    model, batch = Model(), torch.randn(4, 3)
    staged(model, {"pp": 2}, **PIPELINE)
    for trained in (False, True, False):
        model.embed.requires_grad_(trained)
        model.blocks[:2].requires_grad_(trained)
        model.zero_grad()
        forward_backward(model, batch)
        assert (model.blocks[0].layer.weight.grad is not None) == trained
        assert model.head.weight.grad is not None


@pytest.mark.parametrize(
    ("through", "everywhere"), [(late_embed, {"everywhere": "embed"}), (asks, {})]
)
def test_what_a_stage_adds_from_everywhere_is_right(through: Any, everywhere: dict[str, str]):
    def on_a_rank(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        plain = Model(through=through)
        torch.manual_seed(0)
        model = Model(through=through)
        batch = torch.randn(4, 3)
        staged(model, {"pp": 2}, **PIPELINE, **everywhere)
        step_both(model, plain, 2, batch)
        require_gradients(model, plain)

    simulate(2)(on_a_rank)


NO_STAGES = [
    ({"stages": "blocks.{0,1}"}, "leave a stage empty"),
    ({"stages": "layers.*"}, "matches no module"),
    ({"stages": ["blocks.0"]}, "1 glob for 4 stages"),
    ({"stages": ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]}, "follow the order"),
    ({"schedule": "zbv"}, "leave a stage empty"),
    ({"schedule": "1f2b"}, "no schedule"),
    ({"stage": "blocks.*"}, "no 'stage'. Did you mean 'pipeline.stages'"),
    ({"microbatches": 0}, "positive number"),
    ({"schedule": "interleaved", "chunks": 2}, "leave a stage empty"),
]


@pytest.mark.parametrize(("pipeline", "words"), NO_STAGES, ids=str)
def test_plans_that_make_no_stages_are_refused(pipeline: dict[str, Any], words: str):
    with pytest.raises(PlanError, match=words):
        Plan(pipeline="1f1b").with_(**pipeline).check(Model(), {"pp": 4})


def test_stages_are_balanced_and_explained():
    report = Plan().with_(**PIPELINE, stages="blocks.*").check(Model(), {"pp": 2})
    assert report.split is not None
    assert report.split.stages == (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))
    assert report.split.owners["embed.weight"] == 0
    assert report.split.owners["head.weight"] == 1
    assert "schedule 1f1b, 2 microbatches" in str(report)


@on_ranks(4, simulated=True)
def test_a_loss_outside_of_the_model_gets_its_rows():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    batch, targets = torch.randn(4, 3), torch.randint(2, (4,))
    staged(model, {"pp": 2, "dp": 2}, **PIPELINE)

    found = forward_backward(model, batch, loss=(nn.functional.cross_entropy, targets))
    expected = nn.functional.cross_entropy(plain(batch), targets)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-7)
