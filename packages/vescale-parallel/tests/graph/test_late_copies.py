"""A plan of memory waits for copies to the host before it writes where they read.

The copies here are as late as on a GPU they may be: nothing is copied before somebody waits.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_parallel import graph, memory
from vescale_parallel._graph import host_ops

Copy = Callable[[], object]


@pytest.fixture
def late() -> Iterator[list[Copy]]:
    """What has been started and not been done; kernels of the CPU come before those of all."""
    host_ops.operators()
    started: list[Copy] = []
    library = torch.library.Library(host_ops.NAMESPACE, "IMPL")

    def write(x: Tensor, memory: Tensor, offset: int) -> Tensor:
        # Of the memory and not of the value, which it keeps, as the allocator would.
        started.append(lambda: host_ops._write(x, memory, offset))
        return x.new_empty(0)

    def read(token: Tensor, memory: Tensor, offset: int, *like: Any) -> Tensor:
        size, stride, dtype = like
        found = torch.empty_strided(size, stride, dtype=dtype).fill_(torch.nan)
        started.append(lambda: found.copy_(host_ops._place(memory, offset, size, stride, dtype)))
        return found

    def ready(x: Tensor) -> Tensor:
        while started:
            started.pop(0)()
        return x

    for name, call in (("host_write", write), ("host_read", read), ("host_ready", ready)):
        library.impl(name, call, "CPU")
    yield started
    library._destroy()


def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Activations that are used again behind a peak, with memory that is used anew on the way."""
    kept = [torch.tanh(x @ w * k) for k in range(1, 4)]
    y = kept[0] + kept[1] + kept[2]
    for _ in range(3):
        wide = y.repeat(1, 4).exp()
        y = (wide @ wide.mT).softmax(1)
    for one in reversed(kept):
        y = (y * one) @ w
    return y.sum(), y


def test_what_is_copied_is_not_written_over(late: list[Copy]):
    x, w = torch.randn(64, 64), torch.randn(64, 64) / 8
    made = make_fx(function, tracing_mode="fake")(x, w)
    with pytest.raises(graph.GraphError, match="which is the least that") as told:
        graph.offload(made, 1)
    least = int(str(told.value).split("as it is, and ")[1].split()[0].replace(",", ""))
    found = graph.offload(made, least)
    assert len(found.moved) == 3
    planned = memory.plan(found.graph_module, solver="rules", seconds=0)
    assert 0 < sum(step.waits for step in planned._arena.steps) < 3
    expected = function(x, w)
    for _ in range(2):
        got = planned.run(x, w)
        assert not late
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


def test_it_waits_where_it_has_to_only(late: list[Copy]):
    x, w = torch.randn(64, 64), torch.randn(64, 64) / 8
    made = make_fx(function, tracing_mode="fake")(x, w)
    planned = memory.plan(made, solver="rules", seconds=0)
    assert not any(step.waits for step in planned._arena.steps)
