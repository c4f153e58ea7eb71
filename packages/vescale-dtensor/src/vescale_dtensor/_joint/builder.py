"""Nodes added to a traced graph by hand: each says what it makes, as traced ones do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from vescale_dtensor._joint.labels import Label
from vescale_dtensor._torch.compat import fake_tensors


class Builder:
    """Adds nodes at the end of a graph, and inputs behind those that there are.

    Attributes:
        graph: whose nodes say what they make (`meta["val"]`).
        mode: in which the values of nodes are fake.
        label: of the nodes that are added.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        values = (node.meta.get("val") for node in graph.nodes)
        modes = (getattr(one, "fake_mode", None) for one in values)
        self.mode = next((one for one in modes if one is not None), None) or fake_tensors()
        self.label: Label | None = None
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._inputs = len(inputs)
        self._last = inputs[-1] if inputs else None

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call before the output."""
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.call_function(target, args, kwargs)
        given, named = fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*given, **named)
        if self.label is not None:
            node.meta["label"] = self.label
        return node

    def input(self, name: str, value: Any) -> fx.Node:
        """Add an input that is like `value`, a tensor or a number.

        `meta["number"]` says of a number that no shape depends on it.
        """
        end = self._last.next if self._last is not None else next(iter(self.graph.nodes))
        with self.graph.inserting_before(end):
            # Its target is the name of an argument, of which a function has none twice.
            node = self.graph.placeholder(f"{name}_{self._inputs}")
        self._inputs += 1
        self._last = node
        node.meta["source"] = name
        if isinstance(value, Tensor):
            with torch.no_grad():
                value = self.mode.from_tensor(value.detach(), static_shapes=True)
        else:
            node.meta["number"] = True
        node.meta["val"] = value
        return node


def copied(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy whose nodes may be changed, and the copy of each node; constants are shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    return fx.GraphModule(module, graph), copies
