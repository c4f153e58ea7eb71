"""A model in stages that is called under no_grad returns its output on every rank.

Tensors of any memory order pass from stage to stage, also those whose elements share memory.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_models import llama, needs_transformers
from stage_runs import batch, make, plan, require_gradients, staged, step_both, whole
from torch import Tensor, nn
from torch.nn import functional as F
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_parallel import PipelineError, Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh

SIZES = [{"pp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}]


class Net(nn.Module):
    """Blocks between linear layers; returns a nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x).transpose(0, 1), "rest": [x.sum(-1), "text", 3]}


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


CASES = [
    *((sizes, schedule, 0) for sizes in SIZES for schedule in ("1f1b", "zbv")),
    *(({"pp": 2, "dp": 2}, "1f1b", zero) for zero in (1, 2, 3)),
]


@pytest.mark.parametrize(("sizes", "schedule", "zero"), CASES, ids=str)
def test_outputs_are_those_of_one_device(sizes: dict[str, int], schedule: str, zero: int):
    def on_a_rank(rank: int, world_size: int) -> None:
        model, plain = net(), net()
        how = Plan(pipeline=schedule, microbatches=2, zero=zero)
        parallelize(model, make_mesh(device_type="cpu", **sizes), how)
        for step in range(2):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            with torch.no_grad():
                found, expected = model(x), plain(x)
            assert found["rest"][1:] == ["text", 3]
            torch.testing.assert_close(whole(found["logits"]), expected["logits"])
            torch.testing.assert_close(whole(found["rest"][0]), expected["rest"][0])
        with pytest.raises(PipelineError, match="forward_backward"):
            model(x)

    simulate(torch.Size(sizes.values()).numel())(on_a_rank)


@on_ranks(2, simulated=True)
def test_training_goes_on_after_it():
    model, other = make(), make()
    for one in (model, other):
        parallelize(one, make_mesh(device_type="cpu", pp=2), plan("zb-h1", 4))
    model.eval()
    with torch.no_grad():
        before = model(*batch(0))
    model.train()
    torch.manual_seed(1)
    first = forward_backward(model, *batch(0))
    torch.manual_seed(1)
    assert torch.equal(first, forward_backward(other, *batch(0)))
    assert not torch.equal(before, first)


class Odd(Net):
    """Returns what no other rank could be told."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)["logits"], object()


def test_outputs_that_cannot_be_told_are_refused_everywhere():
    def on_a_rank(rank: int, world_size: int) -> str:
        model = Odd()
        parallelize(
            model, make_mesh(device_type="cpu", pp=2), Plan(pipeline="1f1b", microbatches=2)
        )
        with torch.no_grad(), pytest.raises(PipelineError) as told:
            model(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
        return str(told.value)

    torch.manual_seed(0)
    assert all("object" in one for one in simulate(2)(on_a_rank))


@pytest.mark.models
@needs_transformers
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_generate_without_a_cache(sizes: dict[str, int]):
    tokens = torch.randint(3, 32, (4, 5), generator=torch.Generator().manual_seed(0))
    asked: Any = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}

    def on_a_rank(rank: int, world_size: int) -> Tensor:
        model: Any = llama().eval()
        how = Plan.from_hf(model, pipeline="1f1b", microbatches=2)
        parallelize(model, make_mesh(device_type="cpu", **sizes), how)
        with pytest.raises(PipelineError, match="use_cache=False"):
            model.generate(tokens, **asked)
        return whole(model.generate(tokens, use_cache=False, **asked))

    plain: Any = llama().eval()
    expected = plain.generate(tokens, use_cache=False, **asked)
    for found in simulate(torch.Size(sizes.values()).numel())(on_a_rank):
        assert torch.equal(found, expected)


ROWS, SIZE, PARTS = 8, 6, 2

# Of a block's result (rows, `SIZE`) what it returns beside it, with rows first and a gradient.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded behind": lambda h: h[:, :1].expand(-1, 5),
    "expanded between": lambda h: h[:, None].expand(-1, 3, -1),
    "expanded, transposed": lambda h: h[:, None].expand(-1, 3, -1).transpose(1, 2),
    "windows": lambda h: h.unfold(1, 3, 1),
    "every second": lambda h: h[:, ::2],
    "transposed": lambda h: torch.stack([h, h], 2).transpose(1, 2),
    "one number": lambda h: h.mean().expand(len(h), 4),
    "nothing": lambda h: h[:, :0].expand(-1, 0),
}


class Block(nn.Module):
    """Returns what it computes, and a form of it; draws on the form that it is given."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(SIZE, SIZE), form

    def forward(self, x: Tensor, beside: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if beside is not None:
            # Elements that share memory are dropped one by one, in an order that follows strides.
            weights = torch.linspace(0.5, 1.5, beside[0].numel()).view(beside[0].shape)
            x = x + (F.dropout(beside, 0.4) * weights).flatten(1).sum(1, keepdim=True)
        h = self.layer(x).tanh()
        return h, FORMS[self.form](h)


class Model(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Block(form) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        beside = None
        for block in self.blocks:
            x, beside = block(x, beside)
        return x.square().mean()


def step(rank: int, world_size: int, form: str, sizes: dict[str, int], schedule: str) -> None:
    plain, model = Model(form), Model(form)
    staged(model, sizes, schedule=schedule, microbatches=PARTS)
    for _ in range(2):
        step_both(model, plain, PARTS, torch.randn(ROWS, SIZE))
    require_gradients(model, plain)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sizes", "schedule"), [({"pp": 2}, "1f1b"), ({"pp": 2}, "zbv")])
def test_it_is_one_devices(form: str, sizes: dict[str, int], schedule: str):
    simulate(torch.Size(sizes.values()).numel())(step, form, sizes, schedule)


@pytest.mark.parametrize("form", ["expanded behind", "expanded, transposed", "every second"])
def test_so_are_parts_of_rows(form: str):
    simulate(4)(step, form, {"pp": 2, "dp": 2}, "1f1b")
