"""What becomes of other ranks where one of them raises that a function cannot be captured.

All ranks raise, or none does. Whether the others refuse the same call is not asked: they may replay
it, or be late. The refusal is an event instead, which all ranks come to or none may
(`_layout/execution_events.py`): a rank that goes on has another event in its place, and both are
told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from vescale_comm import CommMismatchError

from vescale_dtensor._errors import CaptureError
from vescale_dtensor._layout.execution_events import record
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._tensor.dtensor import DTensor


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
