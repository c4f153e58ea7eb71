"""Fixes which functions the generated code of a program calls.

The code names functions of torch, and looks them up when it runs: one that a user has replaced
since (`torch.relu = mine`) would be called in place of the one that was recorded.
"""

from __future__ import annotations

import re
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
