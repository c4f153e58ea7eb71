"""Tensors of any memory order pass from stage to stage, also those whose elements share memory."""

from collections.abc import Callable

import pytest
import torch
from stage_runs import require_gradients, staged, step_both
from torch import Tensor, nn
from torch.nn import functional as F
from vescale_comm import simulate

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
        x = torch.randn(ROWS, SIZE)
        step_both(model, plain, PARTS, x)
    require_gradients(model, plain)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sizes", "schedule"), [({"pp": 2}, "1f1b"), ({"pp": 2}, "zbv")])
def test_it_is_one_devices(form: str, sizes: dict[str, int], schedule: str):
    simulate(torch.Size(sizes.values()).numel())(step, form, sizes, schedule)


@pytest.mark.parametrize("form", ["expanded behind", "expanded, transposed", "every second"])
def test_so_are_parts_of_rows(form: str):
    simulate(4)(step, form, {"pp": 2, "dp": 2}, "1f1b")
