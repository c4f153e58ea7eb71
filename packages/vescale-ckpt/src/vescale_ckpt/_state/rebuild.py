"""Makes Python containers and values of a saved tree."""

from collections.abc import Iterator
from typing import Any

import torch

from vescale_ckpt._state.values import Node, PerRank, decode_float


def rebuild(node: Node, tensors: dict[str, torch.Tensor]) -> Any:
    """Build the state that `node` describes, with `tensors` by name."""
    if isinstance(node, list):
        return [rebuild(entry, tensors) for entry in node]
    if not isinstance(node, dict):
        return node
    kind, content = next(iter(node.items()))
    match kind:
        case "dict":
            return {key: rebuild(entry, tensors) for key, entry in content}
        case "tuple":
            return tuple(rebuild(entry, tensors) for entry in content)
        case "tensor":
            return tensors[content]
        case "rank_local":
            return PerRank(tuple(rebuild(entry, tensors) for entry in content))
        case "float":
            return decode_float(content)
        case "int":
            return int(content, 16)
    raise AssertionError(f"a node that the parser let through: {kind}")


def tensor_names(node: Node) -> Iterator[str]:
    """Yield the names of all tensors below a node, in order."""
    if isinstance(node, list):
        for entry in node:
            yield from tensor_names(entry)
    elif isinstance(node, dict):
        kind, content = next(iter(node.items()))
        if kind == "tensor":
            yield content
        elif kind == "dict":
            for _, entry in content:
                yield from tensor_names(entry)
        elif kind in ("tuple", "rank_local"):
            yield from tensor_names(content)


def holds_tensor(node: Node) -> bool:
    """Return whether any tensor is below a node."""
    return next(tensor_names(node), None) is not None
