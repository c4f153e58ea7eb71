"""Steps for passes that change where activations live: random functions, and a small model."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_parallel import graph, memory


def random_step(seed: int) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Values that are made early and used late, beside views, writes and draws."""

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        draw = random.Random(seed)
        pool, buffer = [x, y, x @ y], torch.zeros_like(x)
        for _ in range(24):
            one, other = draw.choice(pool), draw.choice(pool[-4:])
            calls = [
                lambda a, b: a + b,
                lambda a, b: a @ b / 16,
                lambda a, b: a.t() * 2,
                lambda a, b: F.dropout(a, 0.5),
                lambda a, b: (a * 1).mul_(b),
                lambda a, b: F.gelu(a),
                lambda a, b: a.softmax(0),
                lambda a, b: torch.cat(a.split(8, 1)[::-1], 1),
                lambda a, b: a.view(-1).view_as(b) - b,
            ]
            made = draw.choice(calls)(one, other)
            if draw.random() < 0.2:
                made = made.clone()
                made[1:].add_(1)
            if draw.random() < 0.1:
                buffer += made.detach()
            pool.append(made)
        # As a backward does: the last values first.
        total = pool[-1]
        for one in reversed(pool[:-1]):
            total = torch.tanh(total * 0.5 + one)
        return [total, buffer]

    return step


def model_step() -> tuple[Any, list[Any]]:
    """Forward and backward of a model, traced, and what it takes."""
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(64, 16), torch.randint(4, (64,))
    names = [name for name, _ in model.named_parameters()]

    def step(parameters: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        leaves = [one.detach().requires_grad_() for one in parameters]
        loss = torch.func.functional_call(model, dict(zip(names, leaves, strict=True)), (x, y))
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    given = [[one.detach() for one in model.parameters()], x, y]
    return make_fx(step, tracing_mode="fake")(*given), given


def with_less_memory(change: Callable[..., Any], module: fx.GraphModule) -> fx.GraphModule:
    """What `graph.recompute` or `offload` makes for the least of some budgets that it reaches."""
    whole = memory.plan(module, solver="rules", seconds=0).program_peak
    for part in (0.6, 0.7, 0.8, 0.9, 0.95):
        try:
            made: fx.GraphModule = change(module, int(whole * part)).graph_module
        except graph.GraphError:
            continue
        return made
    return module


def bits(call: Callable[..., Any], *given: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    return [*call(*(one.clone() for one in given)), torch.get_rng_state()]


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 64), nn.Linear(64, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Net(nn.Module):
    def __init__(self, size: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(size) for _ in range(blocks)))
        self.head = nn.Linear(size, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(x)), y)
