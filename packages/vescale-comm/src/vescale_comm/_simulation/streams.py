"""Order between the streams of an accelerator on which ranks compute, and one of them moves data.

On the host nothing is late, and none of this is called.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Mark = tuple[torch.Stream, torch.Event]
"""A stream, and an event on it."""

_HOST = ("cpu", "meta")


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


def mark(device: torch.device) -> Mark:
    """Return this thread's stream, with an event behind what it has been given."""
    stream = torch.accelerator.current_stream(device)
    return stream, stream.record_event()


def follow(device: torch.device, marks: Iterable[Mark], payload: Any = ()) -> None:
    """Have what this thread's stream is given from here on come after these marks.

    Args:
        device: of the streams.
        marks: of other threads, or of this one.
        payload: what is used here; memory that is freed on another stream then waits for this one.
    """
    here = torch.accelerator.current_stream(device)
    others = [event for stream, event in marks if stream != here]
    for event in others:
        here.wait_event(event)
    # Of one stream for all, as most programs have, nothing has to be said.
    for x in tensors_of(payload) if others else ():
        if x.device.type == device.type:
            x.record_stream(here)
