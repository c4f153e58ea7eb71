"""State of a process that `simulate` swaps when it switches ranks."""

import os
import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from vescale_comm._engine.hooks import Hook, hooks
from vescale_comm._torch.compat import current_world, set_warning_state, use_world, warning_state


def current_device() -> int | None:
    """Return the GPU that is current in this thread; None where CUDA is not in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_device()


@dataclass(slots=True)
class ProcessState:
    """The default generators, torch's process groups, our hooks, warnings and the environment."""

    cpu: Tensor
    cuda: list[Tensor]
    python: Any
    numpy: Any
    world: Any
    hooks: list[Hook]
    warnings: tuple[Any, ...]
    environ: dict[str, str]

    @classmethod
    def captured(cls) -> "ProcessState":
        """Return the state of the rank that runs."""
        # Asking for the state of a GPU's generator initialises CUDA, which a program may never do;
        # and while a graph is captured torch refuses to tell it.
        with_cuda = (
            torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            and not torch.cuda.is_current_stream_capturing()
        )
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if with_cuda else [],
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
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
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
