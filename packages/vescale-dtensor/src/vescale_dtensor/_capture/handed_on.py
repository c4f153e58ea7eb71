"""Functions in C that code hands to others, which call them: `iter(time.time, None)`.

A recording hears of calls that Python code makes, and not of those that C makes of C. So what is
taken as a value counts as called: what gives state is asked by the guard, the rest is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import Any

from vescale_dtensor._capture.own_state import line_of
from vescale_dtensor._capture.places import Look, Namespace, Origin
from vescale_dtensor._capture.process_state import CLOCK_METHODS, getter_of, is_asked
from vescale_dtensor._capture.reads import StateReads
from vescale_dtensor._capture.unsupported import unsteady
from vescale_dtensor._errors import CaptureError


def check_handed_on(reads: StateReads) -> None:
    """Guard, or refuse, what functions in C would give that code of the user's hands on.

    Raises:
        CaptureError: one gives another value each time.
    """
    if not reads.noted and reads.parts_taken.isdisjoint(CLOCK_METHODS):
        return
    for function, origin in list(_handed_on(reads)):
        names = {function.__name__, *origin.names()}
        if not names.isdisjoint(reads.unguarded):
            continue
        if getter_of(function) is None:
            why = unsteady(function.__qualname__, function.__name__)
            raise CaptureError(f"capture: {why}{line_of(origin, reads)}")
        reads.ask(function, Origin(None, f"{function.__name__}()", function.__name__))


def _handed_on(reads: StateReads) -> Iterator[tuple[Any, Origin]]:
    """The functions in question, with how code reaches them."""
    yield from reads.items
    for place in reads.places:
        if isinstance(place, Namespace):
            for name in reads.taken_from(place):
                if is_asked(place.was[name]):
                    yield place.was[name], place.at(name)
        elif isinstance(place, Look) and is_asked(place.was):
            origin = place.origin or Origin(None, "a value", "")
            if not origin.name or origin.name in reads.values:
                yield place.was, origin
    # Classes in C have no namespaces to look into.
    dates = reads.parts_taken & CLOCK_METHODS
    for name in dates if dates and reads.meets_dates() else ():
        yield getattr(date, name, date.today), Origin(None, name, name)
