"""Reports steps of all optimizers, by one pair of torch's hooks for a process.

Optimizers may be made later, and by others, so torch's hooks on all of them are the only way. A
hook for each model would stay when the model is gone: torch may go through its hooks while it is
freed, and these must not change then.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Args = tuple[Any, ...]
Call = tuple[Args, dict[str, Any]]
"""What `step` is called with, itself first."""


class Watcher(Protocol):
    """What is called for steps, for as long as somebody holds it."""

    def before_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> Call | None:
        """Before a step; returns what it is to be called with in place of these, if anything."""

    def after_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> None:
        """Behind it."""


def watch_steps(watcher: Watcher) -> None:
    """Let somebody be called for the steps of all optimizers, behind those who came before."""
    _watched().add(watcher)


@cache
def _watched() -> _Watchers:
    watched = _Watchers()
    register_optimizer_step_pre_hook(watched.before_step)
    register_optimizer_step_post_hook(watched.after_step)
    return watched


class _Watchers:
    """All that are called for steps, in the order in which they came."""

    def __init__(self) -> None:
        self._watchers: tuple[weakref.ref[Any], ...] = ()

    def add(self, watcher: Watcher) -> None:
        """One more; those that are gone are left out from now on."""
        living = [one for one in self._watchers if one() is not None]
        self._watchers = (*living, weakref.ref(watcher))

    def before_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> Call | None:
        """Before a step, called by torch."""
        call: Call | None = None
        for one in self._watchers:
            watcher = one()
            if watcher is not None:
                instead = watcher.before_step(optimizer, args, kwargs)
                if instead is not None:
                    call = args, kwargs = instead
        return call

    def after_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> None:
        """Behind a step, called by torch."""
        for one in self._watchers:
            watcher = one()
            if watcher is not None:
                watcher.after_step(optimizer, args, kwargs)
