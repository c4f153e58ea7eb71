"""Runs the parts of a step as a graph by themselves: its operators, and what it sends.

Together they are the floor of the step: nothing is checked, packed for the caller or waited for in
between. A step that takes less has hidden some of its collectives behind its operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from vescale_comm import graphs
from vescale_dtensor import Joint
from vescale_dtensor._joint.lowering import lower_graph

_ops: Any = torch.ops._c10d_functional
Part = Callable[[], object]


def parts_of(step: Joint, batch: Sequence[Tensor]) -> dict[str, Part]:
    """The parts of a step for a batch, by name: each is called alike on all ranks.

    They work on copies: parameters and states of the optimizer stay as they are.
    """
    given = [one.clone() if isinstance(one, Tensor) else one for one in step.arguments(*batch)]
    return {
        "operators": _operators(step.graph_module, given),
        "collectives": _collectives(step.graph_module),
    }


def _operators(module: fx.GraphModule, given: Sequence[Any]) -> Part:
    """The graph on this rank alone: what others send is zeros, or what this one has, and free."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    for node in list(graph.nodes):
        if node.target in _ALONE:
            node.target = _ALONE[node.target]
        elif node.target is _ops.wait_tensor.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    alone = lower_graph(fx.GraphModule(module, graph))

    def run() -> None:
        with torch.no_grad():
            alone(*given)

    return run


@cache
def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _gathered(x: Tensor, members: int, group: str) -> Tensor:
    return _zeros((members * x.shape[0], *x.shape[1:]), x.dtype)


def _part(x: Tensor, how: str, members: int, group: str) -> Tensor:
    return x[: x.shape[0] // members]


def _same(x: Tensor, *_: object) -> Tensor:
    return x


_ALONE: dict[Any, Any] = {
    _ops.all_gather_into_tensor.default: _gathered,
    _ops.reduce_scatter_tensor.default: _part,
    _ops.all_reduce.default: _same,
    _ops.all_to_all_single.default: _same,
}
_STARTS: dict[Any, Any] = {
    **{one: one for one in _ALONE},
    _ops.all_gather_into_tensor.default: graphs.start_all_gather,
    _ops.all_reduce.default: graphs.start_all_reduce,
}


def _collectives(module: fx.GraphModule) -> Part:
    """All that the graph sends, of the same sizes and in its order, one after the other."""
    nodes: list[Any] = [node for node in module.graph.nodes if node.target in _STARTS]
    sent = []
    for node in nodes:
        like: Tensor = node.args[0].meta["val"]
        x = torch.zeros(tuple(like.shape), dtype=like.dtype)
        sent.append((_STARTS[node.target], x, node.args[1:]))

    def run() -> None:
        for start, x, args in sent:
            graphs.finish(start(x, *args))

    return run
