"""One `with consistent(...)`: which rule holds inside, and which modes and hooks it needs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from vescale_rng._errors import LayoutError
from vescale_rng._torch_dtensor.batch_rows import BatchRows
from vescale_rng._torch_dtensor.data_axes import data_axes
from vescale_rng._torch_dtensor.hooks import installed
from vescale_rng._torch_dtensor.in_force import depth
from vescale_rng._torch_dtensor.modes import ruled, watched_for_data
from vescale_rng._torch_dtensor.rules import BatchRule, PassRule, UnsaidRule


@contextmanager
def unsaid() -> Iterator[None]:
    """Open a block of which nobody has said what plain tensors are."""
    with ExitStack() as stack:
        stack.enter_context(installed())
        # Inside of another block the question is answered; with one rank there is none.
        if not depth() and _ranks() > 1:
            rule = UnsaidRule()
            stack.enter_context(watched_for_data(rule))
            stack.enter_context(ruled(rule))
        yield


def _ranks() -> int:
    there = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if there else 1


@contextmanager
def without_data() -> Iterator[None]:
    """Open a block in which plain tensors are whole on every rank."""
    with ExitStack() as stack:
        stack.enter_context(installed())
        if depth():
            stack.enter_context(ruled(PassRule()))
        yield


@contextmanager
def with_data(data: Any, batch_dim: Any, rows: Any, factories: str | None) -> Iterator[None]:
    """Open a block in which plain tensors are rows of the batch.

    Raises:
        LayoutError: an argument is none that is understood.
    """
    if factories not in (None, "rows", "whole"):
        raise LayoutError(f'factories is "rows", "whole" or None, got {factories!r}')
    axes = data_axes(data)
    if len(axes.ranks) == 1:
        # One rank has all rows.
        with without_data():
            yield
        return
    batch = BatchRows(axes, batch_dim, rows)
    with installed(), ruled(BatchRule(batch, factories)):
        yield
    batch.close()
