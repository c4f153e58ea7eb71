"""Worker threads that copy tensors on the streams of the thread that they work for.

A thread begins with each device's default stream, which need not wait for the caller's: what the
caller's stream has not yet computed would be copied as it is.
"""

from collections.abc import Iterable, Sequence

import torch


def streams_of(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """Return this thread's current streams of these devices."""
    found = torch.accelerator.current_accelerator()
    # Only of these: asking for one would initialise a device that the program does not use.
    ours = {one for one in devices if found is not None and one.type == found.type}
    return [torch.accelerator.current_stream(one) for one in ours]


def use_streams(streams: Sequence[torch.Stream]) -> None:
    """Make them this thread's current streams."""
    for stream in streams:
        torch.accelerator.set_stream(stream)
