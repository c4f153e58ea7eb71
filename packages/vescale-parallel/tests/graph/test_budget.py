"""Budgets of graphs are numbers of bytes or text, and anything else is an error with its name."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_parallel import graph


@pytest.fixture(scope="module")
def doubled():
    return make_fx(lambda x: (x.sin() * x.cos()).sum(), tracing_mode="fake")(torch.ones(64))


@pytest.mark.parametrize("function", [graph.offload, graph.recompute])
@pytest.mark.parametrize("said", ["1KiB", "1.024KB", "1024", 1024, 1024.9])
def test_bytes_as_number_or_text(doubled, function, said):
    assert function(doubled, said).peak <= 1024


@pytest.mark.parametrize("function", [graph.offload, graph.recompute])
@pytest.mark.parametrize("said", ["much", "", "12 apples", 0, -5, True, None, float("nan"), [1]])
def test_anything_else_is_refused_by_name(doubled, function, said):
    with pytest.raises(graph.GraphError, match=r"memory_bytes=.*a number of bytes, at least one"):
        function(doubled, said)
