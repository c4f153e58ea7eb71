"""Shards that lie in memory of the host, and the one way between it and the device.

All copies go through `HostLink`, so that what computes never meets a tensor of the host, and tests
can count what is copied. Nothing is under way from memory of the host once a gather was waited for:
an optimizer, or anybody else, may write to it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from vescale_comm import Group, all_gather_into_tensor

HOST = torch.device("cpu")


def is_host(device_type: str | None) -> bool:
    """Whether devices of this type compute in memory of the host."""
    return device_type == HOST.type


class HostLink:
    """Copies between the host and one device.

    With CUDA both ways are asynchronous, on a stream of their own and from pinned memory, so that
    copies run beside what the device computes.

    Attributes:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pins = device.type == "cuda"
        make: Any = torch.cuda.Stream
        self._stream: Any = make(device) if self._pins else None

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host."""
        return torch.zeros(count, dtype=dtype, device=HOST, pin_memory=self._pins)

    def stream(self) -> AbstractContextManager[Any]:
        """Inside, what is queued on the device follows the copies that were queued before."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def start_to_device(self, shard: Tensor, target: Tensor) -> Any:
        """Start to copy from the host into memory of the device, of any dtype.

        Returns:
            What to pass to `wait`, before the memory of the host may be written to.
        """
        if self._stream is None:
            target.copy_(shard.to(self.device))
            return None
        # The memory may still be in use by what was queued before.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            # Cast on the device: a copy with a cast would be made in pageable memory, and waited
            # for.
            same = shard.dtype == target.dtype
            sent = shard if same else shard.to(self.device, non_blocking=True)
            target.copy_(sent, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copy: Any) -> None:
        """Wait until a copy is done, and have what is queued from now on follow all of them."""
        if copy is not None:
            # The host waits, so that its memory may be written to.
            copy.synchronize()
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def to_host(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return values that were made in `stream` in memory of the host, complete."""
        if self._stream is None:
            return values.to(dtype).to(HOST)
        with self.stream():
            cast = values.to(dtype)
            found = torch.empty(cast.shape, dtype=dtype, device=HOST, pin_memory=True)
            found.copy_(cast, non_blocking=True)
            # Autograd hands it to the host's thread, which knows of no stream.
            self._stream.record_event().synchronize()
        return found


def host_link(device_type: str) -> HostLink:
    """The way between the host and the present device of a type."""
    if device_type == "cuda":
        return HostLink(torch.device(device_type, torch.cuda.current_device()))
    return HostLink(torch.device(device_type))


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring buffers of modules to the device: a model that is offloaded may be on the host."""
    # A buffer that modules share stays shared.
    moved = {id(one): one.to(device) for one in model.buffers()}
    for module in model.modules():
        held = module._buffers
        held.update({name: moved[id(one)] for name, one in held.items() if one is not None})


class HostShard:
    """How a shard on the host is gathered, and how totals come to it.

    Attributes:
        link: to the device.
        keeps: whether the device keeps a copy of the shard, in the compute dtype, between steps.
    """

    def __init__(self, link: HostLink, *, keeps: bool) -> None:
        self.link, self.keeps = link, keeps
        self._kept: Tensor | None = None

    def gather(
        self,
        shard: Tensor,
        target: Tensor,
        group: Group,
        start: int,
        sizes: Sequence[int] | None,
        *,
        is_old: bool,
    ) -> _Gather:
        """Start to gather a shard into memory of the device, where it begins at `start`."""
        # Copied to where it belongs: the gather then has nothing to copy on the device.
        own = target[start : start + shard.numel()]
        if self._kept is not None and self._kept.dtype == target.dtype and not is_old:
            own.copy_(self._kept)
            pending = all_gather_into_tensor(target, own, group, sizes=sizes, async_op=True)
            return _Gather(self.link, None, pending)
        copy = self.link.start_to_device(shard, own)
        # In the stream of copies, so that what is sent has arrived.
        with self.link.stream():
            if self.keeps:
                self._kept = own.clone()
            pending = all_gather_into_tensor(target, own, group, sizes=sizes, async_op=True)
        return _Gather(self.link, copy, pending)

    def total(self, pending: Any, dtype: torch.dtype) -> Tensor:
        """The result of a reduction that is under way, on the host."""
        # In the stream of copies: what the device computes meanwhile is not waited for.
        with self.link.stream():
            found = pending.wait()
        return self.link.to_host(found, dtype)

    def forget(self) -> None:
        """The shard lies elsewhere, or in another dtype: nothing that was copied is of use."""
        self._kept = None


class _Gather:
    """A copy and an all-gather behind it."""

    def __init__(self, link: HostLink, copy: Any, pending: Any) -> None:
        self._link, self._copy, self._pending = link, copy, pending

    def wait(self) -> Any:
        """Have the values, with nothing under way from memory of the host."""
        self._link.wait(self._copy)
        return self._pending.wait()
