"""Finds the line of the caller's code that called a collective."""

import sys
import sysconfig
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType

import torch

# Frames of these are ours, torch's or Python's own, and not where the user wrote the call.
_INSIDE = tuple(
    str(Path(folder)) + "/"
    for folder in (
        Path(__file__).parent.parent,
        Path(torch.__file__).parent,
    )
)
# What is typed at a prompt has no file, and is the user's; other code without one is generated.
_TYPED = ("<stdin>", "<ipython-input", "<python-input")
_STDLIB = tuple(
    f"{sysconfig.get_paths()['stdlib']}/{name}.py" for name in ("contextlib", "threading")
)


def is_inside(code: CodeType) -> bool:
    """Return whether a function is of this package, of torch, or of what runs them."""
    return is_inside_file(code.co_filename)


# Asked for every frame of every call that is waited for later.
@lru_cache(maxsize=1024)
def is_inside_file(name: str) -> bool:
    """Return whether a source file is of this package, of torch, or of what runs them."""
    return name.startswith((*_INSIDE, *_STDLIB, "<")) and not name.startswith(_TYPED)


CallPlace = tuple[CodeType, int]
"""A function, and an instruction in it."""


def call_site() -> str:
    """Return "file:line in function" of the innermost frame that is neither ours nor torch's.

    In a backward it is the line that called it, on CPU; `"backward"` where autograd's own threads
    run it.
    """
    return site_of(call_place())


def call_place() -> CallPlace | None:
    """Return what `site_of` makes `call_site` of: for whoever mostly does not need the words."""
    # Not traceback or inspect: they read source files, and this runs in every traced call.
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not is_inside_file(code.co_filename):
            return code, frame.f_lasti
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def site_of(place: CallPlace | None) -> str:
    """Return a place in words."""
    if place is None:
        return "backward"
    code, at = place
    line = next(islice(code.co_positions(), at // 2, None), (None,))[0]
    return f"{code.co_filename}:{line} in {code.co_name}"
