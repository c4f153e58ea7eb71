"""The flat names of DCP and the saved tree, each made from the other. Pure functions.

DCP joins the keys that lead to a leaf with dots, and turns integer keys of dicts into strings.
Lists are containers where something inside is a tensor or a dict, and values otherwise; tuples are
always values.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vescale_ckpt._errors import StateError
from vescale_ckpt._state.state_keys import child
from vescale_ckpt._state.values import Node, kind_of

# The steps that lead to a leaf: keys of dicts, and integers for the entries of lists.
Path = tuple[str | int, ...]
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}", re.ASCII)


def paths_of(planner_data: Any, names: Iterable[str]) -> dict[str, Path]:
    """Return the way to each leaf: the planner's where it knows, else the name as the only step.

    In the order of the state, which the planner has kept: metadata has it by ranks.
    """
    known = planner_data if isinstance(planner_data, Mapping) else {}
    wanted = dict.fromkeys(names)
    ordered = [name for name in known if name in wanted]
    return {name: tuple(known.get(name, (name,))) for name in dict.fromkeys([*ordered, *wanted])}


def tensor_name(path: Path) -> str:
    """Return what a tensor is called in a manifest, for the way that leads to it."""
    name = ""
    for depth, step in enumerate(path):
        name = child(name, _key(step), top=depth == 0)
    return name


def tree_of(leaves: Mapping[Path, Node]) -> Node:
    """Return the tree of a manifest with these leaves.

    Raises:
        StateError: a leaf lies below another one.
    """
    root: dict[str | int, Any] = {}
    for path, leaf in leaves.items():
        inner = root
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                raise StateError(f"'{_flat(path)}' lies below a value that is not a container")
        if path[-1] in inner:
            raise StateError(f"two entries of the state lead to '{_flat(path)}'")
        # A leaf in a list of its own: nodes are dicts, too, and must not be walked into.
        inner[path[-1]] = [leaf]
    return {"dict": [[_key(step), _node(entry)] for step, entry in root.items()]}


def leaves_of(tree: Node) -> dict[str, Node]:
    """Return the leaves of a saved tree under the names that DCP would give them."""
    found: dict[str, Node] = {}
    for name, node in _walk(tree, ()):
        if name in found:
            raise StateError(f"two entries of the checkpoint are called '{name}' in DCP")
        found[name] = node
    return found


def _walk(node: Node, path: Path) -> Iterator[tuple[str, Node]]:
    kind = kind_of(node)
    if kind == "dict":
        for key, entry in node["dict"]:
            yield from _walk(entry, (*path, str(key)))
    elif kind == "list" and not _is_leaf(node):
        for index, entry in enumerate(node):
            yield from _walk(entry, (*path, index))
    else:
        yield _flat(path), node


def _is_leaf(node: Node) -> bool:
    """Whether DCP takes a node as one value."""
    kind = kind_of(node)
    if kind == "list":
        return all(kind_of(entry) != "tensor" and _is_leaf(entry) for entry in node)
    return kind != "dict"


def _node(entry: Any) -> Node:
    """Return the node of one entry: of a leaf (in its list), or of what is below a step."""
    if isinstance(entry, list):
        return entry[0]
    if all(type(step) is int for step in entry):
        # Empty containers have no leaves, so DCP has dropped them; those inside count, though.
        empty: Node = {"dict": []}
        return [_node(entry[i]) if i in entry else empty for i in range(max(entry) + 1)]
    return {"dict": [[_key(step), _node(below)] for step, below in entry.items()]}


def _key(step: str | int) -> str | int:
    # DCP has made strings of integer keys. They are far more frequent (an optimizer's parameters)
    # than keys that were such strings before.
    if isinstance(step, str) and _INTEGER.fullmatch(step):
        return int(step)
    return step


def _flat(path: Path) -> str:
    return ".".join(map(str, path))
