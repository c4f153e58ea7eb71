"""Captured functions inside of others: who records, who compares, and who just runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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


@contextmanager
def running_inside() -> Iterator[None]:
    """Run captured functions as they are in the block, and note no lineage of writes in it.

    Other ranks may replay what runs in it, and a replay notes none.
    """
    token = _inside.set(True)
    try:
        with _without_lineage():
            yield
    finally:
        _inside.reset(token)


@contextmanager
def running_alone() -> Iterator[None]:
    """Run a refused function in the block, which other ranks may replay."""
    token = _alone.set(True)
    try:
        with _without_lineage():
            yield
    finally:
        _alone.reset(token)


@contextmanager
def _without_lineage() -> Iterator[None]:
    """Note no lineage of writes in the block."""
    pause.depth += 1
    try:
        yield
    finally:
        pause.depth -= 1
