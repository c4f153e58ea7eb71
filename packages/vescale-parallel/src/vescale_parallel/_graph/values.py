"""Writes on nodes what values they make, for later passes and memory plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from vescale_parallel._common.torch_compat import FakeTensorMode


def fake_mode_of(graph: fx.Graph) -> Any:
    """The mode that the graph was traced in: fake tensors of two modes do not mix."""
    modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in graph.nodes)
    return next((one for one in modes if one is not None), None) or FakeTensorMode()


def say_value(node: fx.Node, mode: Any) -> None:
    """Let a node that was added say what it makes, of what its arguments say of themselves."""
    given, named = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    with mode, torch.no_grad():
        node.meta["val"] = node.target(*given, **named)  # type: ignore[operator]
