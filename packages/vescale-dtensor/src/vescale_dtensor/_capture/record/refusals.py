"""Refusals: what runs on in their place, and how other ranks learn of them.

With `capture(..., refused="run")` a refusal ends the recording and not the function, which may have
written, drawn random numbers and communicated by then: its remaining calls run as in eager mode.
Without, all ranks raise, or none does. Whether the others refuse the same call is not asked: they
may replay it, or be late. The refusal is an event instead, which all ranks come to or none may
(`_layout/execution_events.py`): a rank that goes on has another event there, and both raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, NoReturn

import torch
from vescale_comm import CommMismatchError

from vescale_dtensor._capture.guard.code_files import is_users
from vescale_dtensor._capture.record.unsupported import refusal
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._layout.execution_events import record
from vescale_dtensor._layout.layout import Layout
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
        raise refusal(
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


def place_of(function: Callable[..., Any], name: str) -> str:
    """A function, by its name and where it is written: the same text on every rank."""
    code = getattr(getattr(function, "forward", function), "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def tell_others(
    error: CaptureError, place: str, flat: Sequence[Any], met: Mapping[int, Layout]
) -> NoReturn:
    """Raise a refusal, so that ranks which do not refuse the call raise as well.

    Args:
        error: the refusal.
        place: which function it is of, see `place_of`.
        flat: the arguments.
        met: layouts of the DTensors that the function used, one for each mesh, the first one first.

    Raises:
        CaptureError: always; it says so where other ranks have gone on.
    """
    # One mesh: ranks that refuse at different lines may have met different further ones.
    given = (value._spec.layout for value in flat if isinstance(value, DTensor))
    layout = next(given, next(iter(met.values()), None))
    try:
        if layout is not None:
            # By the name alone, since words may hold what differs from rank to rank.
            record(layout.mesh, f"cannot capture {place}, as the error there says")
    except CommMismatchError as mismatch:
        raise CaptureError(f"{error}\nOther ranks do not refuse this call: {mismatch}") from error
    else:
        raise error
    finally:
        del error  # whose traceback holds this frame: a cycle, which would keep all that was made
