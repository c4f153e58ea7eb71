"""Gathers units for a module that backward computes again before it has come to their outputs.

A gradient penalty leads to what is inside of a block, and past its output: only the recomputation
itself tells then that the block's parameters are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vescale_parallel._common.torch_compat import in_backward
from vescale_parallel._zero.schedule import Schedule, zero_schedule_of
from vescale_parallel._zero.unit import Unit


class Recomputation:
    """Called before a module is computed again.

    Args:
        schedule: that of the model.
        units: those that hold parameters of the module, but for units within it, which its own
            calls gather.
    """

    def __init__(self, schedule: Schedule, units: Sequence[Unit]) -> None:
        self.schedule, self.units = schedule, list(units)

    def __call__(self) -> None:
        """Have the units' parameters in the modules. Collective where they are not."""
        if not in_backward():
            return
        for unit in self.units:
            if not (unit.is_swapped or unit.is_lent):
                self.schedule.reached(unit, unit.ran_modules)


def recomputation_of(model: nn.Module, name: str) -> Recomputation | None:
    """What to call before the module of that name is computed again; None without `zero`."""
    schedule = zero_schedule_of(model)
    if schedule is None:
        return None
    inside = set(model.get_submodule(name).modules())
    prefix = f"{name}." if name else ""
    units = [
        unit
        for unit in schedule.units
        if not (unit.name != name and unit.name.startswith(prefix) and unit.name)
        and any(module in inside for held in unit.held for module, _ in held.places)
    ]
    return Recomputation(schedule, units) if units else None
