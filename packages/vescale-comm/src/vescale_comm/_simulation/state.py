"""State of a process that `simulate` swaps when it switches ranks."""

import os
import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from vescale_comm._engine.hooks import Hook, hooks
from vescale_comm._simulation.device_state import DeviceState
from vescale_comm._torch.compat import current_world, set_warning_state, use_world, warning_state


@dataclass(slots=True)
class ProcessState:
    """Generators, devices, torch's process groups, our hooks, warnings and the environment."""

    cpu: Tensor
    devices: DeviceState
    python: Any
    numpy: Any
    world: Any
    hooks: list[Hook]
    warnings: tuple[Any, ...]
    environ: dict[str, str]

    @classmethod
    def captured(cls) -> "ProcessState":
        """Return the state of the rank that runs."""
        return cls(
            torch.get_rng_state(),
            DeviceState.captured(),
            random.getstate(),
            numpy.random.get_state(),
            current_world(),
            list(hooks),
            warning_state(),
            dict(os.environ),
        )

    def restore(self) -> None:
        """Make it the state of the process."""
        torch.set_rng_state(self.cpu)
        self.devices.restore()
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        use_world(self.world)
        # In place: other modules hold this very list.
        hooks[:] = self.hooks
        set_warning_state(self.warnings)
        # Compared first: each write calls putenv, and most switches change nothing.
        if os.environ != self.environ:
            os.environ.clear()
            os.environ.update(self.environ)
