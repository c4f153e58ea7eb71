"""Refuses what a function itself changes of the state that it names, which no replay does again."""

from __future__ import annotations

import linecache
from operator import is_
from typing import Any

from vescale_dtensor._capture.guard.code_names import stored_at
from vescale_dtensor._capture.guard.equality import same
from vescale_dtensor._capture.guard.kinds import values_of
from vescale_dtensor._capture.guard.named_state import Contents, NamedState, Namespace
from vescale_dtensor._capture.guard.places import MISSING, Origin
from vescale_dtensor._capture.guard.state_guard import different_item, same_contents
from vescale_dtensor._errors import CaptureError


def own_changes(state: NamedState) -> list[Origin]:
    """The places that hold something else than before the function ran.

    A container that was replaced by an equal one is no change: functions that rebuild a dict of
    options in each call would never be recorded.
    """
    were = {id(place.container): place for place in state.contents}
    found = []
    for space in state.spaces:
        for name in sorted(map(str, _names(space, state))):
            now, was = space.mapping.get(name, MISSING), space.was.get(name, MISSING)
            if now is not was and not _alike(now, was, were):
                found.append(space.at(name))
    for look in state.looks:
        if not _alike(look.look(), look.was, were):
            found.append(look.origin or Origin(None, "a value", ""))
    replaced = [place for place in state.contents if not same_contents(place)]
    found += map(different_item, replaced)
    # Guards are made after the run, so they would take such a change for the state to expect.
    found += [place.origin for place in state.parts if place.origin and not _has_same(place)]
    return found


def _names(space: Namespace, state: NamedState) -> set[str]:
    """The names of a namespace that the function must not change."""
    there = (space.was.keys() | space.mapping.keys()) - state.unguarded
    if space.whole:
        return there
    named = state.attributes | state.stored
    return there & (named - space.excluded if space.names is None else space.names)


def _has_same(place: Contents) -> bool:
    """Whether a table of a module has the very same contents."""
    values = values_of(place.container) or ()
    return (
        tuple(place.container) == place.items
        and len(values) == len(place.values or ())
        and all(map(is_, values, place.values or ()))
    )


def _alike(now: Any, was: Any, were: dict[int, Contents]) -> bool:
    """Whether a value is what it was, or a new container of the same contents."""
    if same(now, was):
        return True
    # What the old container holds now may be newer, so it is compared as it was when it was met.
    place = were.get(id(was))
    if place is None or type(now) is not type(was) or len(now) != len(place.items):
        return False
    values = values_of(now) or ()
    return all(map(same, now, place.items)) and all(
        _alike(new, old, were) for new, old in zip(values, place.values or (), strict=True)
    )


def changed_error(found: list[Origin], state: NamedState) -> CaptureError:
    """The error for places that the function changes in call after call."""
    # One with a name, which the user can find in the code and list in `unguarded`.
    first = next((origin for origin in found if any(origin.names())), found[0])
    others = len(found) - 1
    more = f" (and {others} more)" if others else ""
    return CaptureError(
        f"capture: the function changes {first}{more} in call after call, where a replay would "
        "leave it as it is: a tensor kept outside, a counter, a list that grows. Return the new "
        "value and keep it outside of the captured function, or write into a tensor in place "
        f"(copy_){_permission(first)}{_line_of(first, state)}"
    )


def _permission(origin: Origin) -> str:
    """What to say of `unguarded`, if the place has a name that it can list."""
    name = next((name for name in origin.names() if name), None)
    if name is None:
        return ""
    return f"; or pass unguarded=[{name!r}] to capture, if replays may ignore it"


def _line_of(origin: Origin, state: NamedState) -> str:
    """The line of the user's code that writes, or names, the place."""
    for name in origin.names():
        for code in state.codes if name else ():
            line = stored_at(code, name)
            if line is not None:
                text = linecache.getline(code.co_filename, line).strip()
                return f"\n  at {code.co_filename}:{line}: {text}"
    return ""
