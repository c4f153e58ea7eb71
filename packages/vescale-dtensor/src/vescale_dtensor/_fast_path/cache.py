"""Where routes are filed: a table for each way in which autograd looks at a call.

A table is bounded; forgetting a route costs time only, since it is learnt anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vescale_dtensor._layout.layout import Spec

Route = Callable[..., Any]
_MOST_ROUTES = 32768


class Table(dict[tuple[Any, ...], Route]):
    """Routes by their keys.

    Attributes:
        shortcuts: the same routes by keys that are quicker to make.
    """

    __slots__ = ("shortcuts",)

    def __init__(self) -> None:
        super().__init__()
        self.shortcuts: dict[tuple[Any, ...], Route] = {}

    def shorten(self, key: tuple[Any, ...], route: Route) -> None:
        """File a route once more."""
        if len(self.shortcuts) >= _MOST_ROUTES:
            self.shortcuts.clear()
        self.shortcuts[key] = route

    def clear(self) -> None:
        """Forget everything: that costs time only."""
        super().clear()
        self.shortcuts.clear()


# No grad mode; grad mode, and nothing to record; autograd records.
unwatched, unrecorded, recorded = Table(), Table(), Table()
# Functions whose rule does not read numbers: a learning rate must not make a key of its own.
number_free: set[Any] = set()
# Of `unrecorded`: two DTensors, and the function itself; what comes out.
of_two: dict[tuple[Any, ...], Spec] = {}


def route_count() -> int:
    """How many routes the tables hold: for tests that count misses."""
    return len(unwatched) + len(unrecorded) + len(recorded)


def make_room(table: dict[Any, Any]) -> None:
    """Empty a table that is full."""
    if len(table) >= _MOST_ROUTES:
        table.clear()  # forgetting a route costs time only


def clear() -> None:
    """Forget every route."""
    for table in (unwatched, unrecorded, recorded, of_two):
        table.clear()
