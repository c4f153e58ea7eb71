"""Where a call comes from that torch, or this package, cannot do: for the words of errors."""

from __future__ import annotations

import sys
from types import FrameType

# What is between the user's code and what refuses it.
_BETWEEN = frozenset({"torch", "vescale_dtensor", "contextlib", "functools", "typing_extensions"})


def call_site() -> str:
    """The module and the line that called torch: of the user's program, or of a library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.split(".")[0] not in _BETWEEN:
            return f"{module} ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return "code that is not Python's"
