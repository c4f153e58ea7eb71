"""Completes gradients before an optimizer's step, and has parameters gathered anew after it."""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any, Final, Protocol

from torch.optim import Optimizer
from vescale_dtensor.storage import reduce_gradients

from vescale_parallel._common.optimizer_hooks import Args, Call
from vescale_parallel._common.plain_steps import HelpedSteps
from vescale_parallel._zero.flat_buffer import FlatBuffer
from vescale_parallel._zero.flat_steps import FlatGroups
from vescale_parallel._zero.owner_steps import Taken, give_back, step_owned
from vescale_parallel._zero.unit import Unit

_Known = weakref.WeakKeyDictionary[Optimizer, tuple[list[Any], list[Unit], list[FlatBuffer]]]
_NOTHING: Final[tuple[list[Any], list[Unit], list[FlatBuffer]]] = ([], [], [])


class SteppedUnits(Protocol):
    """What matters of a schedule."""

    units: list[Unit]
    is_alike: bool


class Steps:
    """Reduces before a step what `no_sync` has kept, and has it gathered anew after it.

    Args:
        schedule: that holds this.
    """

    def __init__(self, schedule: SteppedUnits) -> None:
        # Weakly: what steps refer to is freed with the model, and not by a collection of garbage.
        self._schedule = weakref.ref(schedule)
        self._taken: dict[int, Taken] = {}
        self._flat = HelpedSteps(FlatGroups)
        # For each optimizer its parameters, and what was found for them.
        self._known: _Known = weakref.WeakKeyDictionary()

    def before_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> Call | None:
        """Have complete gradients, and let what can be stepped as one buffer be."""
        units, buffers = self._of(optimizer)
        for unit in units:
            if unit.depth:
                unit.before_step()
        if not buffers:
            return None
        for buffer in buffers:
            # Of backwards in `no_sync` that none outside has followed.
            if buffer.unreduced is not None:
                buffer.flush()
        # All sums over axes that only replicate, in one collective: an op of the optimizer that met
        # one unsummed might first redistribute it.
        reduce_gradients([one for buffer in buffers for one in buffer.parameters])
        self._taken[id(optimizer)] = step_owned(optimizer, buffers, args[1:], kwargs)
        schedule = self._schedule()
        # Of stages each rank has other buffers, and all of them the optimizer's other parameters:
        # stepped by buffer, ranks would write to different ones, and be taken for diverging.
        if schedule is None or not schedule.is_alike:
            return None
        return self._flat.begin(optimizer, buffers, args, kwargs)

    def after_step(self, optimizer: Optimizer, args: Args, kwargs: Any) -> None:
        """What was gathered is old."""
        self._flat.end(optimizer, args)
        give_back(self._taken.pop(id(optimizer), []))
        units, buffers = self._of(optimizer)
        for buffer in buffers:
            buffer.stepped()
        for unit in units:
            # A step amid a forward, as of a loop that is called through the model's hooks.
            if unit.depth:
                unit.after_step(buffers)

    def _of(self, optimizer: Optimizer) -> tuple[list[Unit], list[FlatBuffer]]:
        """Return units and buffers of which an optimizer steps parameters."""
        schedule = self._schedule()
        if schedule is None:
            return [], []  # the model is gone
        # Looked at in each step: groups of parameters are added and replaced while training.
        now = [one for group in optimizer.param_groups for one in group["params"]]
        parameters, units, buffers = self._known.get(optimizer, _NOTHING)
        if len(parameters) == len(now) and all(map(is_, parameters, now)):
            return units, buffers
        stepped = set(map(id, now))
        units = [u for u in schedule.units if any([id(one.stored) in stepped for one in u.held])]
        buffers = [
            buffer
            for unit in units
            for buffer in unit.buffers
            if any([id(one) in stepped for one in buffer.parameters])
        ]
        self._known[optimizer] = now, units, buffers
        return units, buffers
