"""The saved tree of an untrusted manifest, checked node by node."""

import re
from typing import Any

from vescale_ckpt._errors import FormatError
from vescale_ckpt._state.values import MAX_DEPTH, MAX_INT_BITS, Node

_FLOAT = re.compile(r"[0-9a-f]{16}", re.ASCII)
_INT = re.compile(rf"-?0x[0-9a-f]{{1,{MAX_INT_BITS // 4}}}", re.ASCII)


def check_state(state: Any, tensors: set[str]) -> Node:
    """Return `state` if it is a legal tree that uses every one of `tensors` exactly once."""
    walk = _Check(tensors)
    if not (isinstance(state, dict) and list(state) == ["dict"]):
        raise FormatError("manifest.json: 'state' must be a dict node")
    walk.node(state, 0)
    if walk.unused:
        raise FormatError(f"tensor {min(walk.unused)[:80]!r} is nowhere in the state")
    return state


class _Check:
    """Walks the tree once. Recursion is bounded by the depth that the format allows."""

    def __init__(self, tensors: set[str]) -> None:
        self.unused = set(tensors)

    def node(self, node: Any, depth: int) -> None:
        """Check one node and all below it."""
        # A RankLocal adds one level to what the writer allows.
        if depth > MAX_DEPTH + 2:
            raise FormatError(f"manifest.json: the state is nested deeper than {MAX_DEPTH}")
        if isinstance(node, list):
            for entry in node:
                self.node(entry, depth + 1)
        elif isinstance(node, dict):
            if len(node) != 1:
                raise FormatError("manifest.json: a node of the state must have one key")
            self.tagged(*next(iter(node.items())), depth)
        # Everything else that JSON can hold is a plain value.

    def tagged(self, kind: str, content: Any, depth: int) -> None:
        """Check a node that is an object with one key."""
        match kind:
            case "dict":
                self.pairs(content, depth)
            case "tuple" | "rank_local" if isinstance(content, list):
                self.node(content, depth)
            case "tensor" if isinstance(content, str) and content in self.unused:
                # Used up: the same tensor in two places would have to be loaded into both.
                self.unused.remove(content)
            case "float" if isinstance(content, str) and _FLOAT.fullmatch(content):
                pass
            case "int" if isinstance(content, str) and _INT.fullmatch(content):
                pass
            case _:
                shown = f"{{{kind!r:.40}: {content!r:.80}}}"
                raise FormatError(f"manifest.json: {shown} is not a node of a state")

    def pairs(self, pairs: Any, depth: int) -> None:
        """Check the content of a dict node."""
        if not isinstance(pairs, list):
            raise FormatError("manifest.json: a dict node must hold a list of pairs")
        # Strings and integers never compare equal, so one set tells both apart.
        keys = set()
        for pair in pairs:
            if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)):
                raise FormatError("manifest.json: a dict node holds something that is no pair")
            keys.add(pair[0])
            self.node(pair[1], depth + 1)
        if len(keys) < len(pairs):
            raise FormatError("manifest.json: a dict node holds a key twice")
