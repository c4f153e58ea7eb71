"""A small model with layers of experts, its plans, and one device's training of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vescale_dtensor import DTensor
from vescale_parallel import MoE, Plan, balance_loss, mesh, parallelize, z_loss

WIDTH, EXPERTS, ROWS, TOKENS = 16, 6, 5, 7


class Net(nn.Module):
    """A table, layers of experts with shared ones, a head; the loss has the routers' losses."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        options = {"experts": EXPERTS, "top_k": 2, "shared": 20} | options
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([MoE(WIDTH, 24, **options) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 32)
        self.chosen: list[Tensor] = []
        self.loads: list[Tensor] = []

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, extra = self.embed(tokens), 0
        for block in self.blocks:
            out, routing = block(hidden, with_routing=True)
            hidden = hidden + out
            extra = extra + 0.01 * balance_loss(routing) + 0.001 * z_loss(routing)
            self.chosen.append(whole(routing.chosen))
            self.loads.append(whole(routing.load()))
        logits = self.head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten()) + extra


COLUMNS_AND_ROWS = {"*.gate_up_proj": "tp:1", "*.down_proj": "tp:2", "*": "replicate"}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ep4": ({"ep": 4}, {"batch": "ep:0", "experts": "ep"}),
    "ep4, whole batch": ({"ep": 4}, {"batch": None, "experts": "ep"}),
    "dp4": ({"dp": 4}, {"experts": "dp"}),
    "dp4 zero3": ({"dp": 4}, {"experts": "dp", "zero": 3}),
    "ep2 tp2": (
        {"ep": 2, "tp": 2},
        {"batch": "ep:0", "experts": "ep", "parameters": COLUMNS_AND_ROWS},
    ),
    "ep2 dp2": ({"dp": 2, "ep": 2}, {"batch": "dp:0, ep:0", "experts": "ep"}),
    "ep2 zero3": ({"dp": 2, "ep": 2}, {"batch": "dp:0, ep:0", "experts": "ep", "zero": 3}),
    "dp2 ep2 as one": ({"dp": 2, "ep": 2}, {"batch": "dp:0, ep:0", "experts": "dp, ep"}),
    "every rank all": ({"dp": 2, "tp": 2}, {"parameters": COLUMNS_AND_ROWS}),
}


def whole(tensor: Tensor) -> Tensor:
    """The global values."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def made(layout: str | None, **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net(**options)
    if layout is not None:
        sizes, words = LAYOUTS[layout]
        parallelize(model, mesh(**sizes, device_type="cpu"), Plan(**words))
    return model


def train(
    model: nn.Module, steps: int = 3, step: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses and norms of some steps, the experts that all tokens chose, and how many each has.

    Args:
        model: a `Net`, or another that `step` computes the gradients of.
        steps: how many.
        step: from tokens to the loss.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(32, (ROWS, TOKENS))
        if step is None:
            loss = model(tokens, tokens.roll(1, 1))
            loss.backward()
        else:
            loss = step(tokens)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.item()]
    return losses, getattr(model, "chosen", []), getattr(model, "loads", [])
