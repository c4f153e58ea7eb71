"""Where a call comes from: the user's line, for the words of errors, or a module of torch."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.distributed.tensor import placement_types

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


# The module that defines `isinstance` for torch's placements: its name differs over versions.
_PLACEMENT_META = type(placement_types.Shard).__module__


def asked_by_torch_dtensor() -> bool:
    """Whether a module of torch.distributed.tensor reads the attribute whose getter asks."""
    # Frame 0 is this function, 1 the getter, 2 the code that reads the attribute. `isinstance`
    # itself has no frame.
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == _PLACEMENT_META:
        frame = frame.f_back  # the `isinstance` of torch's placements is a Python function
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name.startswith("torch.distributed.tensor")
