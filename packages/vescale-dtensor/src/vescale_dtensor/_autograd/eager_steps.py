"""Runs optimizer steps on DTensors eagerly, also of optimizers that compile parts of their step.

`torch.compile(fullgraph=True)` raises where it meets a tensor that it cannot trace, and a DTensor's
layouts are decided as the program runs. Some third-party optimizers compile parts of their step
unasked. torch has a switch for this, `torch.compiler.set_stance`, and hooks around every step.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from vescale_dtensor._layout.execution_events import note_numbers
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import pause
from vescale_dtensor._torch.compat import no_torch_function

# Optimizers in the middle of a step -> the thread that steps. The stance belongs to the process,
# whose threads may step at the same time (simulated ranks do), so the first step sets it and the
# last one restores it. A step that raises runs no hook after it: see `_drop_ended`. Weak, so that
# such an optimizer is not kept alive.
_stepping: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
# The stance's context manager while it is entered; empty otherwise.
_stance: list[Any] = []


@cache
def run_steps_eagerly() -> None:
    """Make every step of an optimizer with DTensors run eagerly.

    Called when the first leaf is used, so that importing the package registers no hooks.
    """
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The hook before every step of any optimizer."""
    if _stepping:
        _drop_ended()
    first = None if torch.compiler.is_compiling() else _first_of_ours(optimizer)
    if first is None:
        return  # the user compiles the step on purpose, or it has no DTensors
    if not pause.depth:  # other ranks may replay what is recorded here, and a replay has no step
        note_settings(optimizer, first._spec.layout.mesh)
    _stepping[optimizer] = get_ident()
    if not _stance:
        _stance.append(torch.compiler.set_stance("force_eager"))
        _stance[0].__enter__()


def note_settings(optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Note the settings of a step for ranks to compare."""
    # A learning rate that one rank alone lowers is in no call: it is a number among others.
    note_numbers(mesh, f"{type(optimizer).__name__}.step", _settings(optimizer))


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The hook after every step of any optimizer that did not raise."""
    if _stepping.pop(optimizer, None) is not None:
        _give_back()


def _give_back() -> None:
    """Restore the stance if no step is running."""
    if _stance and not _stepping:
        _stance.pop().__exit__(None, None, None)


def _drop_ended() -> None:
    """Forget steps that ended by raising, or the process would never compile again."""
    # A step of a thread that has ended is over. For this thread, the stack shows whether it is
    # running. A step of any other living thread counts as running: nothing shows the contrary.
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


def _first_of_ours(optimizer: Optimizer) -> DTensor | None:
    """The first DTensor among the parameters."""
    given = (each for group in optimizer.param_groups for each in group["params"])
    return next((each for each in given if isinstance(each, DTensor)), None)


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """The settings of all groups by name; those of tensors on the CPU, and pairs, as numbers."""
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        mark = f" of group {number}" if number else ""
        for name, value in group.items():
            if isinstance(value, tuple | list) and name != "params":
                found |= {f"{name}[{i}]{mark}": each for i, each in enumerate(value)}
            elif type(value) is torch.Tensor and not value.ndim and value.device.type == "cpu":
                with no_torch_function():  # nobody's mode is asked about what only this reads
                    found[f"{name}{mark}"] = value.item()
            else:
                found[f"{name}{mark}"] = value
    return found
