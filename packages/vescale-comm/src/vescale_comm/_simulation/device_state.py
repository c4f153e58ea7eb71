"""State of the devices that `simulate` swaps: generators, the current device, and its stream.

Generators belong to the process, so each rank is given its own. The current device and streams
belong to the thread, as autocast does: ranks have their own anyway, but a thread begins on device 0
and its default stream. There what a rank launches would not wait for what the caller has launched
on another stream; so each begins where its caller is.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_NEEDED = (
    *("is_initialized", "get_rng_state_all", "set_rng_state_all", "manual_seed_all"),
    *("current_device", "set_device", "current_stream", "set_stream"),
)


# Once: which accelerator a process has does not change.
@lru_cache(maxsize=1)
def accelerator() -> Any:
    """Return torch's module for the accelerator, such as `torch.cuda`; None if there is none."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    return module if all(hasattr(module, name) for name in _NEEDED) else None


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What a rank has of the accelerator.

    Attributes:
        generators: states of the default generators of all devices; None where they could not be
            read: they do not exist yet, or a graph is being captured.
        unmade: whether they do not exist yet.
        device: the current one; None before the accelerator is initialised.
        stream: the current one of that device.
    """

    generators: list[Tensor] | None = None
    unmade: bool = False
    device: int | None = None
    stream: Any = None

    @classmethod
    def captured(cls) -> "DeviceState":
        """Return the state of the rank that runs."""
        module = accelerator()
        if module is None:
            return cls()
        # Asking for the state of a GPU's generator initialises CUDA, which a program may never do.
        if not module.is_initialized():
            return cls(unmade=True)
        # Refused by torch within a graph's capture; the graph draws from memory of its own there.
        capturing = getattr(module, "is_current_stream_capturing", lambda: False)()
        generators = None if capturing else module.get_rng_state_all()
        return cls(generators, False, module.current_device(), module.current_stream())

    def restore(self) -> None:
        """Make it the state of this thread, and of the process."""
        module = accelerator()
        if module is None or not module.is_initialized():
            return
        if self.device is not None:
            if module.current_device() != self.device:
                module.set_device(self.device)
            if module.current_stream() != self.stream:
                module.set_stream(self.stream)
        if self.generators is not None:
            module.set_rng_state_all(self.generators)
        elif self.unmade:
            # Another rank was the first to use a device. What there is of generators is that
            # rank's; this one's begin as torch makes them: with the seed of the host's, whose state
            # is this rank's by now. Asked for here only: what is captured counts reads of a seed.
            module.manual_seed_all(torch.initial_seed())
