"""A batch through a model, with every function of rows compared with its parts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vescale_parallel._common.messages import listed
from vescale_parallel._errors import ParallelError
from vescale_parallel._local_rows.call import RowsFunction, proving
from vescale_parallel._local_rows.declare import LocalRowsForward
from vescale_parallel._local_rows.parts import require_independent
from vescale_parallel._local_rows.resolve import named_modules


def check_local_rows(
    model: nn.Module, batch: Any, *, modules: str | tuple[str, ...] | None = None
) -> dict[str, int]:
    """Prove, on your own batch, that rows are independent where `local_rows` says so.

    Calls the model, and makes each call of such a function also as parts of its rows, one of them
    empty, and in reverse order: outputs, and gradients of what entered and of parameters, have to
    agree. Some ten times the work of the functions; nothing is left behind.

    Args:
        model: on one device, or as `parallelize` returned it (then on every rank).
        batch: what it is called with: arguments by name, a tuple, or a tensor.
        modules: glob, or globs, over names of modules to prove as well: what a plan shall name.

    Returns:
        How many calls were proven, by function.

    Raises:
        ParallelError: rows are not independent: what differs, and where. Or nothing was proven.
    """
    counts: dict[str, int] = {}

    def prove(rows: RowsFunction, given: inspect.BoundArguments) -> None:
        require_independent(rows, given)
        counts[rows.name] = counts.get(rows.name, 0) + 1

    args, kwargs = _arguments(batch)
    with _declared(model, modules), proving(prove):
        model(*args, **kwargs)
    if not counts:
        raise ParallelError(
            "check_local_rows: the model has called no function of local_rows, and no module that "
            "a plan names so. Pass modules='*.moe' for those that a plan shall name."
        )
    return counts


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch), {}


@contextmanager
def _declared(model: nn.Module, modules: str | tuple[str, ...] | None) -> Iterator[None]:
    """Let modules be functions of rows until the block ends."""
    globs = (modules,) if isinstance(modules, str) else modules or ()
    names, dead = named_modules(globs, model)
    if dead:
        raise ParallelError(f"check_local_rows: {listed(dead)} match no module.")
    chosen = {name: model.get_submodule(name) for name in names}
    fresh = {n: one for n, one in chosen.items() if "forward" not in vars(one)}
    for name, one in fresh.items():
        one.forward = LocalRowsForward(one, name, None)
    try:
        yield
    finally:
        for one in fresh.values():
            del one.forward
