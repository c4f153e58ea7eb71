"""One `with consistent(...)`: which rule holds inside, and which modes and hooks it needs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from vescale_rng._errors import LayoutError
from vescale_rng._policy import policy
from vescale_rng._torch_dtensor.batch_rows import BatchRows
from vescale_rng._torch_dtensor.current_rule import depth, in_force, placing
from vescale_rng._torch_dtensor.data_axes import data_axes
from vescale_rng._torch_dtensor.hooks import installed
from vescale_rng._torch_dtensor.modes import ruled, watched_for_data
from vescale_rng._torch_dtensor.rules import (
    BatchRule,
    BlockRule,
    OneDataRankRule,
    PassRule,
    UnsaidRule,
)


@contextmanager
def unsaid() -> Iterator[None]:
    """Open a block for which the user did not say what plain tensors are."""
    with ExitStack() as stack:
        # Inside of another block the question is answered; with one rank there is none.
        if depth():
            pass
        elif _ranks() == 1:
            stack.enter_context(_opened(PassRule(), modes=_has_map()))
        else:
            rule = UnsaidRule()
            stack.enter_context(watched_for_data(rule))
            stack.enter_context(_opened(rule, modes=True))
        yield


def _ranks() -> int:
    there = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if there else 1


@contextmanager
def without_data() -> Iterator[None]:
    """Open a block in which plain tensors are replicated."""
    # Modes only where those of an outer block have to be overruled, or torch's own numbers.
    with _opened(PassRule(), modes=depth() > 0 or _has_map()):
        yield


def _has_map() -> bool:
    """Whether the policy in force draws plain tensors otherwise than torch does."""
    return policy() != "native"


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
        # One rank has all rows. Of several, others may have other parts of them.
        watched = depth() > 0 or _ranks() > 1 or _has_map()
        with _opened(OneDataRankRule(axes), modes=watched):
            yield
        return
    batch = BatchRows(axes, batch_dim, rows)
    with _opened(BatchRule(batch, factories), modes=True):
        yield
    # After the block, not in a `finally`: where it ends with an error the other ranks may never
    # come to this collective.
    batch.close()


@contextmanager
def _opened(rule: BlockRule, modes: bool = False) -> Iterator[None]:
    """Let a rule hold in this thread, with the modes that send it every random op or without."""
    with installed(_recomputed), ruled(rule) if modes else in_force(rule):
        yield


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that draws as it does now, also when this block has ended."""
    rule = placing()
    if not isinstance(rule, BlockRule):
        return function

    def draw_again(*args: Any, **kwargs: Any) -> Any:
        if placing() is rule:
            return function(*args, **kwargs)
        # A backward outside of the block, or in a thread of autograd, which entered none.
        with _opened(rule, modes=True):
            return function(*args, **kwargs)

    return draw_again
