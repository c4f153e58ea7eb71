"""Captured functions inside of others: who records, who compares, and who just runs."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from vescale_dtensor._layout.execution_events import silent
from vescale_dtensor._tensor.lineage import pause

# Context variables, as ranks of a simulation are threads of one process.
# Set where the function of a captured one runs: captured functions that it calls just run. They are
# part of the recording, or other ranks replay them as a part of this call.
_inside: ContextVar[bool] = ContextVar("vescale_dtensor_inside_captured", default=False)
# Set where a refused function runs, which other ranks may replay: captured functions that it calls
# are replayed, but nothing that ranks do together is counted, compared or voted on.
_alone: ContextVar[bool] = ContextVar("vescale_dtensor_alone_in_captured", default=False)

is_inside = _inside.get
"""Whether captured functions just run."""

is_alone = _alone.get
"""Whether what runs may run on this rank alone."""


class running_inside:
    """A block in which captured functions run as they are, and no lineage of writes is noted.

    Other ranks may replay what runs in it, and a replay notes none.
    """

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _inside.set(True)
        pause.depth += 1

    def __exit__(self, *_: object) -> None:
        pause.depth -= 1
        _inside.reset(self._token)


def run_uncompared(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], inside: bool = True
) -> Any:
    """Run a function where nothing is compared over ranks, as some of them replay what it does.

    No context manager: calls that no program stands for come here, and each Python call shows.

    Args:
        function: it.
        args: its arguments by position.
        kwargs: and by name.
        inside: whether captured functions in it run as they are; else they are replayed.
    """
    variable = _inside if inside else _alone
    token, compared = variable.set(True), silent.set(True)
    pause.depth += 1
    try:
        return function(*args, **kwargs)
    finally:
        pause.depth -= 1
        silent.reset(compared)
        variable.reset(token)
