"""Order between the streams of an accelerator on which ranks compute, and one of them moves data.

On the host nothing is late, and none of this is called.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_of(payload: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and tuples."""
    if isinstance(payload, Tensor):
        yield payload
    elif isinstance(payload, list | tuple):
        for one in payload:
            yield from tensors_of(one)


def device_of(payload: Any) -> torch.device | None:
    """Return the accelerator that a member's tensors are on; None: they are on the host."""
    return next((x.device for x in tensors_of(payload) if x.device.type not in _HOST), None)


_HOST = ("cpu", "meta")


def mark(device: torch.device) -> torch.Event:
    """Return an event behind what this thread's stream has been given."""
    return torch.accelerator.current_stream(device).record_event()


def follow(device: torch.device, events: Iterable[torch.Event]) -> None:
    """Have what this thread's stream is given from here on come after these."""
    stream = torch.accelerator.current_stream(device)
    for event in events:
        stream.wait_event(event)


def use_here(device: torch.device, payload: Any) -> None:
    """Have memory that is freed on its own stream wait for this thread's."""
    stream = torch.accelerator.current_stream(device)
    for x in tensors_of(payload):
        if x.device.type == device.type:
            x.record_stream(stream)
