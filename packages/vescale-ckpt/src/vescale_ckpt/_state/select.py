"""Loads a part of a checkpoint, or under other names: globs over names, and moved subtrees."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from vescale_ckpt._errors import MismatchError
from vescale_ckpt._state.state_keys import child
from vescale_ckpt._state.values import Node, kind_of

# As Python writes it: no digits of other scripts, no zeros in front. Python reads 4300 digits.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,4299}")


def wanted_by(patterns: str | Iterable[str] | None, name: str) -> bool:
    """Return whether any of `patterns` matches `name`; without patterns everything is wanted."""
    return patterns is None or any(fits(pattern, name) for pattern in patterns_of(patterns))


def patterns_of(patterns: str | Iterable[str] | None) -> Iterable[str]:
    """Return the globs, of which there may be one, several or none."""
    if patterns is None:
        return ()
    return (patterns,) if isinstance(patterns, str) else patterns


def fits(pattern: str, name: str) -> bool:
    """Return whether a glob matches a name. Upper and lower case differ on every system."""
    return fnmatchcase(name, pattern)


def renamed(state: Node, rename: Mapping[str, str] | None) -> Node:
    """Move subtrees of a saved tree: names in the checkpoint -> names in `into`."""
    if not rename:
        return state
    # All are removed before any is inserted again, so that two may change places.
    taken = []
    for old, new in rename.items():
        state, node = _removed(state, old.split("/"), old)
        taken.append((new, node))
    for new, node in taken:
        state = _inserted(state, new.split("/"), node, new)
    return state


def _removed(tree: Node, steps: list[str], name: str) -> tuple[Node, Node]:
    position = _position(tree, steps[0])
    if position is None:
        raise MismatchError(f"rename: the checkpoint holds nothing at '{name}'")
    key, inner = tree["dict"][position]
    pairs = [*tree["dict"]]
    if len(steps) == 1:
        del pairs[position]
        return {"dict": pairs}, inner
    rest, node = _removed(inner, steps[1:], name)
    pairs[position] = [key, rest]
    # A dict without other entries has moved with it.
    if not rest["dict"]:
        del pairs[position]
    return {"dict": pairs}, node


def _inserted(tree: Node, steps: list[str], node: Node, name: str) -> Node:
    if kind_of(tree) != "dict":
        raise MismatchError(f"rename: '{name}' would lie inside something that is no dict")
    position = _position(tree, steps[0])
    pairs = [*tree["dict"]]
    if len(steps) == 1:
        if position is not None:
            raise MismatchError(f"rename: the checkpoint holds something at '{name}' already")
        return {"dict": [*pairs, [_key(steps[0], name), node]]}
    if position is None:
        inner = _inserted({"dict": []}, steps[1:], node, name)
        return {"dict": [*pairs, [_key(steps[0], name), inner]]}
    key, inner = pairs[position]
    pairs[position] = [key, _inserted(inner, steps[1:], node, name)]
    return {"dict": pairs}


def _position(tree: Node, step: str) -> int | None:
    if kind_of(tree) != "dict":
        return None
    steps = [child("", key, top=True) for key, _ in tree["dict"]]
    return steps.index(step) if step in steps else None


def _key(step: str, name: str) -> Any:
    """Return the key that a step of a name stands for; `MismatchError` if no key is called so."""
    # Of a key and its name each gives the other: a subtree is found again where it was inserted.
    key = _meant(step)
    called = child("", key, top=True)
    if called != step:
        raise MismatchError(f"rename: no key is called '{step}' in '{name}': write '{called}'")
    return key


def _meant(step: str) -> str | int:
    if step.startswith("~s"):
        return step[2:]
    if _INTEGER.fullmatch(step):
        return int(step)
    return step.replace("~1", "/").replace("~0", "~")
