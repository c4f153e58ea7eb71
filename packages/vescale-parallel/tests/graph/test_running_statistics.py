"""Batch norms write to running statistics, of which their schemas say nothing: passes know it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_steps import with_less_memory
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_parallel import graph, memory


def read_before(x: Tensor, mean: Tensor, var: Tensor) -> Any:
    """What is read before the statistics are written, and after."""
    before = mean * 1.0
    y = torch.nn.functional.batch_norm(x, mean, var, training=True)
    return y, before, mean + 1.0


def lives_across(x: Tensor, mean: Tensor, var: Tensor) -> Any:
    """A result that lives across the peak, and would be cheap to compute again."""
    y = torch.nn.functional.batch_norm(x, mean, var, training=True)
    large = (x.repeat(8, 1) + 1.0).sum()
    return y * large, mean + 1.0


def unused(x: Tensor, mean: Tensor, var: Tensor) -> Any:
    """Only the statistics are wanted."""
    torch.nn.functional.batch_norm(x, mean, var, training=True)
    return x + 1.0, mean + 1.0


PASSES: dict[str, Callable[[fx.GraphModule], Any]] = {
    "rules": lambda module: memory.plan(module, solver="rules", seconds=0).run,
    "search": lambda module: memory.plan(module, seconds=1).run,
    "recompute": lambda module: with_less_memory(graph.recompute, module),
    "both": lambda module: (
        memory.plan(with_less_memory(graph.recompute, module), solver="rules", seconds=0).run
    ),
}


def statistics() -> tuple[Tensor, Tensor]:
    return torch.zeros(8), torch.ones(8)


@pytest.mark.parametrize("change", PASSES)
@pytest.mark.parametrize("program", [read_before, lives_across, unused])
def test_as_eager(program: Callable[..., Any], change: str):
    torch.manual_seed(0)
    module = make_fx(program, tracing_mode="fake")(torch.randn(16, 8), *statistics())
    found = PASSES[change](module)
    mine, plain = statistics(), statistics()
    for _ in range(2):
        x = torch.randn(16, 8)
        for one, other in zip(found(x, *mine), program(x, *plain), strict=True):
            assert torch.equal(one, other)
        assert all(map(torch.equal, mine, plain))
