"""Prepares a program's graph for `torch.compile`.

Collectives, autograd nodes and random fills are module-level functions that no compiler should look
into: torch.compile breaks its graph there, calls them as they are, and continues.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import fx


def compilable(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph module whose steps of these packages are closed to torch.compile."""
    # A copy: the program goes on with its own graph, whose steps need no wrappers.
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for node in graph.nodes:
        if node.op == "call_function" and _is_ours(node.target):
            node.target = _closed(node.target)
    return fx.GraphModule(module, graph, "Program")


def _is_ours(target: Any) -> bool:
    """Whether a step is a function of these packages."""
    return str(getattr(target, "__module__", "")).startswith("vescale")


# One wrapper for each function, so that torch.compile meets the same one in all programs.
@lru_cache(maxsize=256)
def _closed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch.compile calls as it is."""

    # `disable` marks what it is given, and the function itself is used elsewhere.
    @wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    closed: Callable[..., Any] = torch.compiler.disable(step)  # type: ignore[no-untyped-call]
    return closed
