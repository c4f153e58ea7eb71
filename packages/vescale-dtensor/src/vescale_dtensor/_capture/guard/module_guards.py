"""Guards on modules: train flags, hooks, and which parameters, buffers and submodules they have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import nn

from vescale_dtensor._torch.compat import global_module_hooks

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
"""Where a module keeps its hooks."""

PARTS = ("_parameters", "_buffers", "_modules")
"""Where a module keeps what it consists of."""

_TABLES = (*PARTS, *HOOKS)


def _tables_in(state: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(map(state.get, _TABLES))


class ModuleGuard:
    """What a program's modules were like when it was recorded. Asked at every call.

    It looks at as little memory as it can, which after a training step is in no cache: dicts that
    were empty are asked for their lengths, which lie beside what their identity is counted by.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        states = [vars(module) for module in modules]
        self.modules = tuple(modules)
        self._states = states
        self._flags = [state.get("training") for state in states]
        # Code may put another dict in the place of one, which the contents of the old do not show.
        # In C, but for modules that were unpickled from before torch had all of these.
        whole = all(state.keys() >= set(_TABLES) for state in states)
        self._tables_in: Any = itemgetter(*_TABLES) if whole else _tables_in
        self._tables = list(chain.from_iterable(map(self._tables_in, states)))
        hooks = [state[name] for state in states for name in HOOKS if name in state]
        hooks += global_module_hooks()
        parts = [state[name] for state in states for name in PARTS if name in state]
        # Hooks may be written straight into them, without a handle that torch counts.
        self._empty = [d for d in (*hooks, *parts) if not d]
        # With the keys, which say in which order hooks run, and which of them take keywords.
        self._hooks = [(d, list(d.items())) for d in hooks if d]
        self._parts = [d for d in parts if d]
        self._counts = list(map(len, self._parts))
        self._names = list(chain.from_iterable(self._parts))
        self._values = list(chain.from_iterable(map(dict.values, self._parts)))

    def holds(self) -> bool:
        """Whether they still are."""
        try:
            return (
                # Lengths before values: `map` stops at the shorter of its lists. By identity, as
                # `==` of parameters would be an op.
                [state.get("training") for state in self._states] == self._flags
                and all(
                    map(is_, chain.from_iterable(map(self._tables_in, self._states)), self._tables)
                )
                and not any(self._empty)
                and list(map(len, self._parts)) == self._counts
                and list(chain.from_iterable(self._parts)) == self._names
                and all(map(is_, chain.from_iterable(map(dict.values, self._parts)), self._values))
                and (not self._hooks or all(list(d.items()) == was for d, was in self._hooks))
            )
        except KeyError:  # somebody has taken one of the dicts out of a module
            return False
