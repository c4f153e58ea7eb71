"""One rank's items on their way from the caller, who copies them, to the thread that writes."""

import queue
from dataclasses import dataclass

import torch

from vescale_ckpt._errors import CheckpointError
from vescale_ckpt._format.write_item import WriteItem
from vescale_ckpt._save.buffers import Buffers
from vescale_ckpt._save.write import LocalTensors, as_one_file, split_item

# Of the bytes that may be in flight, an item takes at most this share, so that copying and
# writing overlap.
_PARTS = 8


@dataclass(frozen=True)
class _Staged:
    """One item in host memory; on its way there until `event`, if it comes from a device."""

    buffer: torch.Tensor
    pinned: bool
    event: torch.Event | None


class StagingQueue:
    """The items of one save, in the order of the file.

    Attributes:
        items: What is copied and written.
        fits: Whether all of it may be copied before any of it is written.
        loaded: Whether copying has ended, or failed.
        interrupt: What stopped copying and is for the caller to see, such as KeyboardInterrupt.
    """

    def __init__(
        self, buffers: Buffers, local_tensors: LocalTensors, items: tuple[WriteItem, ...]
    ) -> None:
        part_bytes = max(1, buffers.max_bytes // _PARTS)
        self.items = as_one_file(part for item in items for part in split_item(item, part_bytes))
        self.nbytes = sum(item.nbytes for item in items)
        self.fits = self.nbytes <= buffers.max_bytes
        self.copied = False
        self.interrupt: BaseException | None = None
        self.buffers, self._local_tensors = buffers, local_tensors
        self._queue: queue.SimpleQueue[_Staged | BaseException] = queue.SimpleQueue()
        self._current: _Staged | None = None

    def copy_all(self) -> None:
        """Copy every item, in order; then the state may change. What fails, `data` raises.

        So all ranks get to know of it, whatever it was.
        """
        self.copied = True
        try:
            self._copy_each()
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
        if last is not None:
            last.synchronize()

    def _copy(self, source: torch.Tensor) -> _Staged:
        pinned = source.device.type == "cuda"
        buffer = self.buffers.acquire(source.numel() * source.element_size(), pinned=pinned)
        buffer.view(source.dtype).view(source.shape).copy_(source, non_blocking=pinned)
        if not pinned:
            return _Staged(buffer, pinned, None)
        event = torch.Event(source.device)
        event.record(torch.cuda.current_stream(source.device))
        return _Staged(buffer, pinned, event)

    def release_all(self) -> None:
        """Give back all that was copied: it will not be written."""
        while not self._queue.empty():
            staged = self._queue.get()
            if isinstance(staged, _Staged):
                self._release(staged)

    def data(self, item: WriteItem) -> memoryview:
        """Return the bytes of the next item, once they are there."""
        staged = self._queue.get()
        if isinstance(staged, BaseException):
            raise CheckpointError(f"copying the state failed: {staged}") from staged
        if staged.event is not None:
            staged.event.synchronize()
        self._current = staged
        return staged.buffer.numpy().data

    def done(self, item: WriteItem) -> None:
        """Take back the buffer of the item that `data` gave last: it is written."""
        assert self._current is not None
        self._release(self._current)
        self._current = None

    def _release(self, staged: _Staged) -> None:
        self.buffers.release(staged.buffer, pinned=staged.pinned)
