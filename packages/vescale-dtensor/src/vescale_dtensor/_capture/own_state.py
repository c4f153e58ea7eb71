"""Refuses what a program could not do again with Python state: hidden state, and own changes."""

from __future__ import annotations

import linecache

from vescale_dtensor._capture.code_files import USER, kind_of_code
from vescale_dtensor._capture.code_names import stored_at
from vescale_dtensor._capture.places import Origin
from vescale_dtensor._capture.reads import StateReads
from vescale_dtensor._errors import CaptureError


def check_visible(reads: StateReads) -> None:
    """Refuse what code can read and no guard can compare.

    Raises:
        CaptureError: an iterator, a big array, an object of an extension; what only a weak
            reference leads to.
    """
    for value, origin in reads.only_weakly_met():
        where = origin or Origin(None, "the function", "")
        raise CaptureError(
            f"capture: only the weak reference {where} leads to a {type(value).__name__}, which a "
            "program would keep alive. Hold it where the function can see it, by a reference that "
            f"is not weak{_permission(where)}{line_of(where, reads)}"
        )
    for value, origin in reads.hidden:
        what = value if isinstance(value, str) else f"a {type(value).__name__}"
        where = origin or Origin(None, "the function", "")
        raise CaptureError(
            f"capture: {where} is {what}, whose state a replay would not see. Pass what is needed "
            f"of it as an argument{_permission(where)}{line_of(where, reads)}"
        )


def changed_error(found: list[Origin], reads: StateReads) -> CaptureError:
    """The error for places that the function changes in call after call."""
    # One with a name, which the user can find in the code and list in `unguarded`.
    first = next((origin for origin in found if any(origin.names())), found[0])
    others = len(found) - 1
    more = f" (and {others} more)" if others else ""
    return CaptureError(
        f"capture: the function changes {first}{more} in call after call, where a replay would "
        "leave it as it is: a tensor kept outside, a counter, a list that grows. Return the new "
        "value and keep it outside of the captured function, or write into a tensor in place "
        f"(copy_){_permission(first)}{line_of(first, reads)}"
    )


def _permission(origin: Origin) -> str:
    """What to say of `unguarded`, if the place has a name that it can list."""
    name = next((name for name in origin.names() if name), None)
    if name is None:
        return ""
    return f"; or pass unguarded=[{name!r}] to capture, if replays may ignore it"


def line_of(origin: Origin, reads: StateReads) -> str:
    """The line of the user's code that writes, or names, the place."""
    for name in origin.names():
        for code in reversed(reads.codes) if name else ():
            line = stored_at(code, name) if kind_of_code(code) == USER else None
            if line is not None:
                text = linecache.getline(code.co_filename, line).strip()
                return f"\n  at {code.co_filename}:{line}: {text}"
    return ""
