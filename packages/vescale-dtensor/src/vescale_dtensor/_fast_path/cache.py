"""Where routes are filed: a table for each way in which autograd looks at a call.

A table is bounded; forgetting a route costs time only, since it is learnt anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vescale_dtensor._dispatch.plain_operands import on_forget
from vescale_dtensor._dispatch.registry import on_change
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._torch.bounded_cache import BoundedCache

Route = Callable[..., Any]
Key = tuple[Any, ...]
_MOST_ROUTES = 32768


class Table(BoundedCache[Key, Route]):
    """Routes by their keys.

    Attributes:
        shortcuts: the same routes by keys that are quicker to make.
    """

    __slots__ = ("shortcuts",)

    def __init__(self) -> None:
        super().__init__(_MOST_ROUTES)
        self.shortcuts: BoundedCache[Key, Route] = BoundedCache(_MOST_ROUTES)

    def clear(self) -> None:
        """Forget everything: that costs time only."""
        super().clear()
        self.shortcuts.clear()


# No grad mode; grad mode, and nothing to record; autograd records.
unwatched, unrecorded, recorded = Table(), Table(), Table()
# Of `unrecorded`: two DTensors, and the function itself; what comes out.
of_two: BoundedCache[Key, Spec] = BoundedCache(_MOST_ROUTES)
# Of functions of lists, without grad mode: specs of the results, or None where it writes to its
# first list.
of_lists: BoundedCache[Key, tuple[Spec, ...] | None] = BoundedCache(4096)

for _cache in (unwatched, unrecorded, recorded, of_two, of_lists):
    on_change(_cache.clear)  # what is filed followed from a rule
    on_forget(_cache.clear)  # a route leads past the comparison of plain operands


def route_count() -> int:
    """How many routes the tables hold: for tests that count misses."""
    return len(unwatched) + len(unrecorded) + len(recorded)
