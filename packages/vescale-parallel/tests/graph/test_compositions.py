"""Every pass on the result of every pass, in each order and twice: the bits of the given graph."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from graph_steps import bits, random_step
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_parallel import graph, memory


def at_half(change: Callable[..., Any], module: fx.GraphModule) -> fx.GraphModule:
    """What a pass makes for a budget half-way between the least that it reaches and all."""
    whole = memory.plan(module, solver="rules", seconds=0).program_peak
    for part in (0.6, 0.7, 0.8, 0.9, 0.95):
        try:
            made: fx.GraphModule = change(module, int(whole * part)).graph_module
        except graph.GraphError:
            continue
        return made
    return module


PASSES: dict[str, Callable[[fx.GraphModule], fx.GraphModule]] = {
    "recompute": lambda module: at_half(graph.recompute, module),
    "offload": lambda module: at_half(graph.offload, module),
    "schedule": lambda module: graph.schedule(module).graph_module,
}


@pytest.mark.parametrize("names", list(product(PASSES, repeat=2)), ids=" ".join)
def test_bits(names: tuple[str, str]):
    moved = 0
    for seed in range(3):
        x, y = torch.randn(16, 16), torch.randn(16, 16)
        made = found = make_fx(random_step(seed), tracing_mode="fake")(x, y)
        for name in names:
            found = PASSES[name](found)
        for values in ((x, y), (y, x)):
            assert all(map(torch.equal, bits(made, *values), bits(found, *values)))
        planned = memory.plan(found, solver="rules", seconds=0).run
        assert all(map(torch.equal, bits(made, x, y), bits(planned, x, y)))
        moved += sum("host_write" in str(node.target) for node in found.graph.nodes)
    assert ("offload" in names) == (moved > 0)
