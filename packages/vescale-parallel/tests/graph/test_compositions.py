"""Every pass on the result of every pass, in each order and twice: the bits of the given graph."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from graph_steps import bits, random_step, with_less_memory
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_parallel import graph, memory

PASSES: dict[str, Callable[[fx.GraphModule], fx.GraphModule]] = {
    "recompute": lambda module: with_less_memory(graph.recompute, module),
    "offload": lambda module: with_less_memory(graph.offload, module),
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
