"""Backward of `checkpoint(use_reentrant=True)` of DTensors: its nodes are called by hand.

A bridge asks the engine for the gradients of the tensors in which a hidden graph ends, and torch's
reentrant checkpoint refuses to run where somebody asks for gradients by name. Calling the nodes
in the engine's order asks for nothing, and lets torch refuse what the user himself asked by name.
The same graph may have nodes of custom Functions, whose results went into the checkpoint, or which
took its result: these are called by hand as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from vescale_dtensor._torch.compat import hidden_node, hidden_output_number

_NODE: Any = getattr(CheckpointFunction, "_backward_cls", None)
# Filed with a node that a user has seen: it may have hooks, which only the engine calls.
SHOWN = "vescale_dtensor.shown"
# What `CheckpointFunction.apply` takes before the arguments of the checkpointed function.
_LEADING = 2


def has_reentrant(nodes: Sequence[Any]) -> bool:
    """Whether a hidden graph has reentrant checkpoints, and all its nodes can be called by hand.

    Not those that a user has seen, which may have hooks, and not what C++ made by itself.
    """
    return any(type(node) is _NODE for node in nodes) and all(
        isinstance(node, BackwardCFunction) and SHOWN not in node.metadata for node in nodes
    )


def reentrant_gradients(
    nodes: Sequence[Any],
    roots: Sequence[Tensor],
    starts: Sequence[Tensor],
    sources: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """`engine_gradients` of a hidden graph that has reentrant checkpoints.

    Args:
        nodes: all of the graph.
        roots: wrappers to start from.
        starts: their cotangents.
        sources: the tensors whose gradients are returned.
    """
    arrived: dict[Any, list[Tensor | None]] = {node: [] for node in nodes}
    found: dict[int, Tensor] = {}
    for root, start in zip(roots, starts, strict=True):
        _add_at(arrived[hidden_node(root)], hidden_output_number(root), start)
    # A node is made after those that its gradients go to: the engine goes by these numbers, too.
    for node in sorted(nodes, key=lambda node: -node._sequence_nr()):
        if not arrived[node]:
            continue
        for (after, place), gradient in _edges(node, _materialized(arrived.pop(node), node)):
            if after is None or gradient is None:
                continue
            source = getattr(after, "variable", None)
            if source is None:
                _add_at(arrived[after], place, gradient)
            else:
                known = found.get(id(source))
                found[id(source)] = gradient if known is None else known + gradient
    return tuple(found.get(id(source)) for source in sources)


def _edges(node: Any, cotangents: Sequence[Tensor]) -> list[tuple[Any, Tensor | None]]:
    """What a node's gradients go to, with the gradients."""
    returned = node.apply(*cotangents)
    if type(node) is _NODE:
        gradients = [returned[_LEADING + place] for place in node.tensor_indices]
        return list(zip(node.next_functions, gradients, strict=True))
    if not isinstance(returned, tuple):
        returned = (returned,)
    # Inputs that are no tensors have no edge; those that want no gradient an empty one, if any.
    wanted = [g for g, needed in zip(returned, node.needs_input_grad, strict=False) if needed]
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return list(zip(edges, wanted, strict=True))


def _add_at(cotangents: list[Tensor | None], place: int, cotangent: Tensor) -> None:
    cotangents.extend([None] * (place + 1 - len(cotangents)))
    known = cotangents[place]
    cotangents[place] = cotangent if known is None else known + cotangent


def _materialized(cotangents: list[Tensor | None], node: Any) -> list[Tensor]:
    """Zeros for the outputs that were not used, as the engine gives them."""
    outputs = node._input_metadata
    cotangents = cotangents + [None] * (len(outputs) - len(cotangents))
    return [
        torch.zeros(tuple(output.shape), dtype=output.dtype, device=output.device)
        if cotangent is None
        else cotangent
        for cotangent, output in zip(cotangents, outputs, strict=True)
    ]
