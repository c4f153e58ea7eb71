"""The generated code of a program: which functions it calls, and which `torch.compile` looks into.

The code names functions of torch, and looks them up when it runs: some have other names there, and
one that a user has replaced since (`torch.relu = mine`) would be called in place of the one that
was recorded. Collectives, autograd nodes and random fills are module-level functions that no
compiler should look into: torch.compile breaks its graph there, and calls them as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, wraps
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import fx

# `relu = torch.relu(argument_0)`: the name of a node, and the path of the function that it calls.
_CALL = re.compile(r"^ +(\w+) = torch((?:\.\w+)+)\(", re.MULTILINE)
_NAME = re.compile(r"\btorch((?:\.\w+)+)")


def pin(module: fx.GraphModule) -> None:
    """Let the code of a module call the very functions that its graph has."""
    root: Any = SimpleNamespace()
    targets = {node.name: node.target for node in module.graph.nodes if node.op == "call_function"}
    # Dtypes and devices among the arguments, too, which no node has for its target.
    found: dict[str, Any] = dict.fromkeys(_NAME.findall(module.code))
    found |= {path: targets.get(name) for name, path in _CALL.findall(module.code)}
    for path, target in found.items():
        _put(root, path, target)
    forward: Any = module.forward
    # Of this module alone: the names of one program.
    forward.__func__.__globals__["torch"] = root


def _put(root: Any, path: str, value: Any = None) -> None:
    """Set what a path below torch stands for; without a value, what it stands for now."""
    *parents, last = path.removeprefix(".").split(".")
    here, there = root, cast("Any", torch)
    for name in parents:
        there = getattr(there, name, None)
        if not isinstance(there, ModuleType):
            # A class, whose attributes are looked up in it; or part of a text.
            setattr(here, name, there)
            return
        # Never the module itself, into which the next line would write.
        if not isinstance(getattr(here, name, None), SimpleNamespace):
            setattr(here, name, SimpleNamespace())
        here = getattr(here, name)
    if value is None and not hasattr(there, last):
        return
    setattr(here, last, getattr(there, last) if value is None else value)


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
