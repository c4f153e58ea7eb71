"""Optimizers that compile parts of their step run them eagerly where parameters are DTensors.

`torch.compile(fullgraph=True)` raises where it meets a tensor that it cannot trace, and a DTensor's
layouts are decided as the program runs. Some optimizers of other people compile such parts of their
own accord. torch has a switch for this, `torch.compiler.set_stance`, and hooks around every step.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from vescale_dtensor._tensor.dtensor import DTensor

# Optimizers in the middle of a step. The stance is the process's, whose threads may step at once
# (simulated ranks do), so the first takes it and the last gives it back. One whose step raised
# stays until its next step: nobody is told that it ended.
_stepping: WeakSet[Optimizer] = WeakSet()
_stance: list[Any] = []


@cache
def run_steps_eagerly() -> None:
    """Have every step of an optimizer with DTensors run eagerly. Called at the first leaf."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not _has_ours(optimizer):
        return  # the user compiles the step himself, or nothing in it needs this
    _stepping.add(optimizer)
    if not _stance:
        _stance.append(torch.compiler.set_stance("force_eager"))
        _stance[0].__enter__()


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _stepping.discard(optimizer)
    if _stance and not _stepping:
        _stance.pop().__exit__(None, None, None)


def _has_ours(optimizer: Optimizer) -> bool:
    return any(
        isinstance(parameter, DTensor)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
