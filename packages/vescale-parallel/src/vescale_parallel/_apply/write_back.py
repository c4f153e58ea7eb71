"""Copies what a module writes to copied lists and dicts back into the caller's own.

A rule about activations redistributes tensors within an argument, which takes a new list. A block
that appends an auxiliary loss to that list means the caller's.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn
from vescale_comm.nested import Copied, field_names
from vescale_dtensor import untraced

_Snapshot = tuple[Any, Any, Any]
"""A container, the one that took its place, and what that one held then, by place or key."""


class WrittenBack:
    """Looks at the containers that a module was given, when it has run."""

    def __init__(self) -> None:
        self._calls: list[tuple[nn.Module, list[_Snapshot]]] = []

    def watch(self, module: nn.Module, copied: Copied) -> None:
        """Note, in a forward pre-hook, which containers take the place of the caller's.

        Args:
            module: that is called.
            copied: as `map_tensors` gives them.
        """
        is_hooked = any(
            getattr(hook, "__self__", None) is self for hook in module._forward_hooks.values()
        )
        if copied and not is_hooked:
            # The last one first: what a later hook has copied goes back into what this one made.
            module.register_forward_hook(self._after, prepend=True, always_call=True)
        # Also where nothing was copied this time: the hook takes the last note of its module, which
        # would be that of an outer call.
        if copied or is_hooked:
            self._calls.append((module, [(old, new, _items(new)) for old, new in copied]))

    @untraced
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._calls:
            of, snapshots = self._calls.pop()
            if of is module:
                # The outer ones first: an inner list that was taken out of them is written to all
                # the same.
                for old, new, before in reversed(snapshots):
                    _write_back(old, new, before)
                return

    def __deepcopy__(self, memo: dict[int, Any]) -> WrittenBack:
        return self


def _items(container: Any) -> Any:
    if isinstance(container, list):
        return list(container)
    if isinstance(container, MutableMapping):
        return dict(container)
    return {name: getattr(container, name) for name in field_names(container)}


def _write_back(old: Any, new: Any, before: Any) -> None:
    """Do to a container what was done to the one in its place."""
    now = _items(new)
    if isinstance(old, list):
        if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
            return
        # What is there still is the caller's own; what is new is as it is.
        own = {id(given): one for given, one in zip(before, old, strict=False)}
        old[:] = [own.get(id(one), one) for one in now]
    elif isinstance(old, MutableMapping):
        for key in [key for key in before if key not in now]:
            old.pop(key, None)
        for key, one in now.items():
            if key not in before or one is not before[key]:
                old[key] = one
    else:
        for name, one in now.items():
            if name not in before or one is not before[name]:
                setattr(old, name, one)
