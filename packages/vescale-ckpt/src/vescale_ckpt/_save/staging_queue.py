"""Carries one rank's items from the caller, who copies them, to the thread that writes them.

One side calls `copy_all`, the other `data` and `done` for each item, in the same order. The queue
between them is the only hand-over: what is in it belongs to the writing thread.
"""

import queue
from dataclasses import dataclass

import torch

from vescale_ckpt._errors import CheckpointError
from vescale_ckpt._format.write_item import WriteItem
from vescale_ckpt._save.buffers import Buffers
from vescale_ckpt._save.write import LocalTensors, as_one_file, split_item

# Share of the bytes in flight that one item may be at most, so that copying and writing overlap.
_PARTS = 8
# Devices whose copies to pinned memory run while the host continues.
_PINS = ("cuda", "xpu")


@dataclass(frozen=True)
class _StagedItem:
    """One item in host memory; if it comes from a device, the copy is complete once `event` is."""

    buffer: torch.Tensor
    pinned: bool
    event: torch.Event | None


class StagingQueue:
    """The items of one save, in the order of the file.

    Attributes:
        items: what is copied and written.
        nbytes: their bytes.
        fits: whether all of it may be copied before any of it is written.
        copied: whether `copy_all` was called.
        interrupt: an exception that stopped copying and is for the caller to see, such as
            KeyboardInterrupt.
    """

    def __init__(
        self, buffers: Buffers, local_tensors: LocalTensors, items: tuple[WriteItem, ...]
    ) -> None:
        # Parts no larger than a share of the buffers: an item that needs all of them could only be
        # copied after everything before it is written.
        part_bytes = max(1, buffers.max_bytes // _PARTS)
        self.items = as_one_file(part for item in items for part in split_item(item, part_bytes))
        self.nbytes = sum(item.nbytes for item in items)
        self.fits = self.nbytes <= buffers.max_bytes
        self.copied = False
        self.interrupt: BaseException | None = None
        self.buffers, self._local_tensors = buffers, local_tensors
        self._queue: queue.SimpleQueue[_StagedItem | BaseException] = queue.SimpleQueue()
        self._current: _StagedItem | None = None

    def copy_all(self) -> None:
        """Copy every item, in order; then the state may change. What fails here, `data` raises.

        The writing thread raises it within `all_or_none`, so all ranks get to know of it.
        """
        self.copied = True
        try:
            self._copy_each()
        # Also a KeyboardInterrupt: the writing thread waits for the next item, and other ranks for
        # it.
        except BaseException as error:
            self._queue.put(error)
            if not isinstance(error, Exception):
                self.interrupt = error

    def _copy_each(self) -> None:
        last: torch.Event | None = None
        for item in self.items:
            staged = self._copy(self._local_tensors.view(item))
            last = staged.event or last
            self._queue.put(staged)
        # Copies of one stream complete in order. The caller may change the state once the last one
        # has.
        if last is not None:
            last.synchronize()

    def _copy(self, source: torch.Tensor) -> _StagedItem:
        # Only pinned memory lets a copy from a device run while the host continues.
        pinned = source.device.type in _PINS
        buffer = self.buffers.acquire(source.numel() * source.element_size(), pinned=pinned)
        buffer.view(source.dtype).view(source.shape).copy_(source, non_blocking=pinned)
        if not pinned:
            return _StagedItem(buffer, pinned, None)
        # Recorded on the stream that copies, so the writing thread can wait for just this item.
        event = torch.Event(source.device)
        event.record(torch.accelerator.current_stream(source.device))
        return _StagedItem(buffer, pinned, event)

    def release_all(self) -> None:
        """Give back all that was copied: it will not be written."""
        # Only before writing has begun: no other thread reads the queue then.
        while not self._queue.empty():
            staged = self._queue.get()
            if isinstance(staged, _StagedItem):
                self._release(staged)

    def data(self, item: WriteItem) -> memoryview:
        """Return the bytes of the next item, once they are there."""
        # Blocks until the caller has added the next item, or its error.
        staged = self._queue.get()
        if isinstance(staged, BaseException):
            raise CheckpointError(f"copying the state failed: {staged}") from staged
        if staged.event is not None:
            staged.event.synchronize()
        # Kept until `done`: the buffer must not be reused while its bytes are written.
        self._current = staged
        return staged.buffer.numpy().data

    def done(self, item: WriteItem) -> None:
        """Release the buffer of the item that `data` returned last: it is written."""
        assert self._current is not None
        self._release(self._current)
        self._current = None

    def _release(self, staged: _StagedItem) -> None:
        self.buffers.release(staged.buffer, pinned=staged.pinned)
