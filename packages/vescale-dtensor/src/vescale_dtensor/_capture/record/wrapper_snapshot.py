"""Restores the wrappers that a recording touched.

A use of a DTensor leaves caches on its wrapper for later uses: aliases, cached redistributions.
Those that an argument came with belong to the program, as arguments of it. Those that the recording
leaves on wrappers from outside are taken off again: they belong to one call, not to the next.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from vescale_dtensor._autograd.redistribution_cache import CachedRedistribution
from vescale_dtensor._autograd.uses import UseAliases
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.state import result_outdated

_WrapperState = tuple[DTensor, "UseAliases | None", "CachedRedistribution | None", Spec]


class WrapperSnapshot:
    """The wrappers from outside that a recording has met, put back when it ends."""

    def __init__(self) -> None:
        # By id; the state holds the wrapper. DTensors compare by element, so they are no keys.
        self._states: dict[int, _WrapperState] = {}

    def add_argument(self, wrapper: DTensor) -> None:
        """Meet an argument, which may bring what earlier uses left on it."""
        if id(wrapper) not in self._states:
            state = wrapper, wrapper._use_aliases, wrapper._cached_redistribution, wrapper._spec
            self._states[id(wrapper)] = state

    def add_free_tensor(self, wrapper: DTensor) -> None:
        """Meet any other wrapper, which starts as if it had not been used."""
        if id(wrapper) not in self._states:
            result_outdated(wrapper)
            # Without caches: a recording that used them would leave out the step that filled them,
            # and the next call may find them gone.
            self.add_argument(wrapper)

    def __enter__(self) -> WrapperSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        """Take off what the recording left."""
        for wrapper, aliases, cached, spec in self._states.values():
            # Their node belongs to the graph of this call: a later use must not be joined to it.
            wrapper._use_aliases = aliases
            if wrapper._spec.base is spec.base:  # it may have been given other data
                wrapper._cached_redistribution, wrapper._spec = cached, spec
            elif wrapper._cached_redistribution is not None:
                result_outdated(wrapper)
        self._states.clear()
