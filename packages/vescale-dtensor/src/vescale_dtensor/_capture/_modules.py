"""Guards on modules: train flags, hooks, and which parameters, buffers and submodules they have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from vescale_dtensor._torch_compat import global_module_hooks

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_PARTS = ("_parameters", "_buffers", "_modules")


@contextmanager
def modules_called() -> Iterator[list[nn.Module]]:
    """Collect every module that is called in the block."""
    called: list[nn.Module] = []

    def note(module: nn.Module, _: Any) -> None:
        called.append(module)

    handle = register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        handle.remove()


def with_submodules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """These modules and all below them, each once."""
    found = {id(m): m for top in modules for m in top.modules()}
    return list(found.values())


class ModuleGuard:
    """What a program's modules were like when it was recorded. Asked at every call."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        states = [vars(module) for module in modules]
        self.modules = tuple(modules)
        self._states = states
        self._flags = [state["training"] for state in states]
        hooks = [state[name] for state in states for name in _HOOKS if name in state]
        hooks += global_module_hooks()
        parts = [state[name] for state in states for name in _PARTS]
        # Most of these dicts are empty, and all of those are asked by one `any`.
        self._empty = [d for d in chain(hooks, parts) if not d]
        self._hooks = [(d, list(d.items())) for d in hooks if d]
        self._parts = [(d, list(d.values())) for d in parts if d]

    def holds(self) -> bool:
        """Whether they still are."""
        return (
            [state["training"] for state in self._states] == self._flags
            and not any(self._empty)
            and all(len(d) == len(was) and all(map(is_, d.values(), was)) for d, was in self._parts)
            and all(list(d.items()) == was for d, was in self._hooks)
        )
