"""Optimizers that compile parts of their step run them eagerly where parameters are DTensors.

`torch.compile(fullgraph=True)` raises where it meets a tensor that it cannot trace, and a DTensor's
layouts are decided as the program runs. Some optimizers of other people compile such parts of their
own accord. torch has a switch for this, `torch.compiler.set_stance`, and hooks around every step.
"""

from __future__ import annotations

import sys
from functools import cache
from threading import enumerate as enumerate_threads
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from vescale_dtensor._tensor.dtensor import DTensor

# Optimizers in the middle of a step, and their threads. The stance is the process's, whose threads
# may step at once (simulated ranks do), so the first takes it and the last gives it back. A step
# that raises runs no hook after it: see `_drop_ended`.
_stepping: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_stance: list[Any] = []


@cache
def run_steps_eagerly() -> None:
    """Have every step of an optimizer with DTensors run eagerly. Called at the first leaf."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _stepping:
        _drop_ended()
    if torch.compiler.is_compiling() or not _has_ours(optimizer):
        return  # the user compiles the step himself, or nothing in it needs this
    _stepping[optimizer] = get_ident()
    if not _stance:
        _stance.append(torch.compiler.set_stance("force_eager"))
        _stance[0].__enter__()


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _stepping.pop(optimizer, None) is not None:
        _give_back()


def _give_back() -> None:
    if _stance and not _stepping:
        _stance.pop().__exit__(None, None, None)


def _drop_ended() -> None:
    """Forget steps that ended by raising, or they would keep the process from compiling."""
    own, alive = get_ident(), {thread.ident for thread in enumerate_threads()}
    for optimizer, thread in list(_stepping.items()):
        if thread not in alive or (thread == own and not _is_running(optimizer)):
            _stepping.pop(optimizer, None)
    _give_back()


def _is_running(optimizer: Optimizer) -> bool:
    """Whether a function of this optimizer is on this thread's stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _has_ours(optimizer: Optimizer) -> bool:
    return any(
        isinstance(parameter, DTensor)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
