"""Steps of every kind through every pass and pair of passes: eager mode's bits, step after step.

Norms with running statistics, dropout, writes, views, ties, complex weights, autocast inside and
around, buffers that are read before and after they are written; the optimizer is in the graph.
"""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from graph_steps import with_less_memory
from torch import Tensor, fx, nn, optim
from vescale_comm import simulate
from vescale_parallel import Plan, graph, memory, mesh, parallelize


class Step(nn.Module):
    """Two layers, and what a kind does between them."""

    def __init__(self, between: Callable[["Step", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm, self.between = nn.BatchNorm1d(32), between
        self.tied = nn.Linear(32, 8, bias=False)
        self.tied.weight = self.second.weight
        self.turn = nn.Parameter(torch.randn(32, 4, dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.between(self, torch.tanh(self.first(x))))
        return y.square().mean()


def write(m: Step, x: Tensor) -> Tensor:
    y = x * 2
    y[:, ::2] += 1.0
    return y.relu_()


def read_around(m: Step, x: Tensor) -> Tensor:
    before = m.seen * 1.0
    with torch.no_grad():
        m.seen.add_(x.mean(0))
    return x + before - m.seen


def island(m: Step, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.tied(x)
    return x + y.float().sum(1, keepdim=True)


KINDS: dict[str, Callable[[Step, Tensor], Tensor]] = {
    "norm": lambda m, x: m.norm(x) + m.norm.running_mean,
    "dropout": lambda m, x: nn.functional.dropout(x, 0.3, m.training),
    "writes": write,
    "views": lambda m, x: x.view(-1, 4, 8).transpose(1, 2).flatten(1)[:, 4:].repeat(1, 2)[:, :32],
    "ties": lambda m, x: x + m.tied(x).sum(1, keepdim=True),
    "complex": lambda m, x: x + (x.to(torch.complex64) @ m.turn).abs().sum(1, keepdim=True),
    "autocast inside": island,
    "autocast around": lambda m, x: x,
    "buffers": read_around,
    "norm in eval": lambda m, x: m.norm(x),
}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": lambda p: optim.AdamW(p, 0.01),
    "adam": lambda p: optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: optim.SGD(p, 0.001, momentum=0.9, nesterov=True),
}


PASSES: dict[str, Callable[[fx.GraphModule], Any]] = {
    "recompute": lambda module: with_less_memory(graph.recompute, module),
    "offload": lambda module: with_less_memory(graph.offload, module),
    "schedule": lambda module: graph.schedule(module).graph_module,
    "compile": lambda module: graph.compile_regions(module, backend="eager").graph_module,
    "memory": lambda module: memory.plan(module, solver="rules", seconds=0).run,
}
WAYS = [(one,) for one in PASSES]
# What is compiled is no graph of operators any more, and a plan's `run` none at all.
WAYS += [(a, b) for a, b in product(PASSES, repeat=2) if a not in ("memory", "compile")]


def trained(rank: int, world_size: int, kind: str, name: str, steps: int) -> None:
    torch.manual_seed(0)
    eager = parallelize(Step(KINDS[kind]), mesh(device_type="cpu", dp=1), Plan())
    eager.norm.train(kind != "norm in eval")
    # Of each step anew: casts of weights are kept until such a region ends.
    region = partial(torch.autocast, "cpu", torch.bfloat16, kind == "autocast around")
    for way in WAYS:
        plain, model = copy.deepcopy(eager), copy.deepcopy(eager)
        first, second = (OPTIMIZERS[name](one.parameters()) for one in (plain, model))
        with region():
            step = graph.train_step(model, model, torch.randn(4, 8)).with_optimizer(second)
        model.load_state_dict(eager.state_dict())
        module: Any = step.graph_module
        for one in way:
            module = PASSES[one](module)
        step = step.running(module)
        for at in range(steps):
            x = torch.randn(4, 8)
            torch.manual_seed(at)
            first.zero_grad()
            with region():
                expected = plain(x)
            expected.backward()
            first.step()
            torch.manual_seed(at)
            with region():
                found = step(x)
            pairs = [(found, expected)]
            pairs += zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
            for pair in pairs:
                one, two = (getattr(each, "full_tensor", each.detach)() for each in pair)
                # What a compiler takes has products in place of `alpha=`, as of SGD's rate.
                exact = "compile" not in way or name == "adamw"
                same = torch.equal(one, two) if exact else torch.allclose(one, two, 1e-4, 1e-6)
                assert same, (way, at)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(900)
def test_bits_of_eager_mode(kind: str, name: str):
    simulate(1).run(trained, kind, name, 20)
