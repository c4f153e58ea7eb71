"""Makes placeholders for values of another stage, where no function is expected.

A mode sees every function of the model, and costs several calls of Python for each. Where a forward
has passed on what stands for other stages' values and done nothing else with it, the next one of
its kind goes without: these tensors tell of functions that take them, and others cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, Protocol

from torch import Tensor, nn
from vescale_comm.nested import map_tensors, tensors_within

from vescale_parallel._common.torch_compat import plain_functions

CAN_STAND: Final = plain_functions is not nullcontext
"""Whether this torch lets a subclass of its tensors call functions as if it was none."""

_PLAIN: Final = frozenset({Tensor, nn.Parameter})


class Watcher(Protocol):
    """The forward in which tensors stand for others."""

    def begin_to_look(self) -> bool:
        """A function takes one of them. Returns whether a mode sees functions from now on."""


class WatchedPlaceholder(Tensor):
    """A tensor whose value means nothing, and which tells of functions that take it."""

    # Of who made it, as it stands in for the same value in one forward after another.
    watchers: list[Watcher]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let a mode see the function, if it is none that asks for a shape or a dtype."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":
            with plain_functions():
                found = func(*args, **kwargs)
            if not isinstance(found, Tensor):
                return found
        for one in tensors_within((args, kwargs)):
            if (
                isinstance(one, WatchedPlaceholder)
                and one.watchers
                and one.watchers[-1].begin_to_look()
            ):
                return func(*args, **kwargs)
        if all(kind is cls or kind in _PLAIN for kind in types):
            with plain_functions():
                return func(*args, **kwargs)
        # Other subclasses still have to see it.
        return func(*map_tensors(_plain, args), **map_tensors(_plain, kwargs))


def watched_placeholder(tensor: Tensor, watchers: list[Watcher]) -> WatchedPlaceholder:
    """The same memory, as a tensor that tells the last of `watchers` of its uses."""
    made: WatchedPlaceholder = tensor.as_subclass(WatchedPlaceholder)
    made.watchers = watchers
    return made


def _plain(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, WatchedPlaceholder):
        return tensor
    with plain_functions():
        return tensor.as_subclass(Tensor)
