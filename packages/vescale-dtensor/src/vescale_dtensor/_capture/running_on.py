"""Goes on where a recording stops: what a refused call has run already is not run again.

With `capture(..., refused="run")` a refusal ends the recording and not the function, which may have
written, drawn random numbers and communicated by then: its remaining calls run as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

from vescale_dtensor._capture.code_files import is_users
from vescale_dtensor._capture.unsupported import refused
from vescale_dtensor._tensor.dtensor import DTensor

# Where torch looks up, by their names, functions that it has written in Python.
_FUNCTIONS = (torch.nn.functional, torch, torch.functional, torch.nn.init)


class Done:
    """What a call under the recorder has run so far.

    Attributes:
        started: whether the function was called.
        results: what it returned; empty before it did.
    """

    __slots__ = ("results", "started")

    def __init__(self) -> None:
        self.started = False
        self.results: list[Any] = []

    def run(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and keep its result."""
        self.started = True
        result = func(*args, **kwargs)
        self.results.append(result)
        return result


def _replaced_in(func: Callable[..., Any], owners: Sequence[Any]) -> str | None:
    """The name of what a function of the user's has replaced in one of these, if it did."""
    if not isinstance(func, FunctionType) or not is_users(func.__code__):
        return None
    names = (name for owner in owners for name, one in vars(owner).items() if one is func)
    return next(names, None)


def check_not_replaced(func: FunctionType) -> None:
    """Refuse a function of torch that is the user's: torch calls it inside of itself, too.

    Raises:
        CaptureError: the function is such a one.
    """
    name = _replaced_in(func, (torch.Tensor, *_FUNCTIONS))
    if name is not None:
        raise refused(
            f"torch's {name} has been replaced, and torch calls the replacement twice "
            "where calls are recorded. Call your function by its own name"
        )


def run_plainly(func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call that a mode got as eager mode runs it, where no mode stands in between."""
    if any(issubclass(kind, DTensor) for kind in types):
        return DTensor.__torch_function__(func, types, args, kwargs)
    # torch looks up by name what it hands to a mode. The replacement is what calls this method.
    name = _replaced_in(func, (torch.Tensor,))
    original = None if name is None else getattr(torch._C.TensorBase, name, None)
    return (original or func)(*args, **kwargs)
