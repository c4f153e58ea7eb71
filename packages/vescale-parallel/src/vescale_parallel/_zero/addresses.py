"""Finds by its address of which gathered buffer a tensor is a view."""

from __future__ import annotations

from bisect import bisect_right

from vescale_parallel._zero.flat_buffer import FlatBuffer


class Addresses:
    """The gathered buffers of a schedule, sorted by address.

    Whoever asks for many tensors goes through the lists by `bisect`, without a call for each.

    Attributes:
        starts: the first address of each buffer.
        ends: for each, the address after its last byte.
        buffers: for each, the buffer.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.buffers: list[FlatBuffer] = []
        # By the id of a buffer, where it starts.
        self._of: dict[int, int] = {}

    def note(self, buffer: FlatBuffer) -> None:
        """A buffer is gathered: it is where its `full` is, and nowhere else."""
        full = buffer.full
        assert full is not None
        start = full.data_ptr()
        known = self._of.get(id(buffer))
        if known == start:
            return
        if known is not None:
            self.forget(buffer)
        # What was at this address before is gone.
        if start in self.starts:
            self.forget(self.buffers[self.starts.index(start)])
        self._of[id(buffer)] = start
        at = bisect_right(self.starts, start)
        self.starts.insert(at, start)
        self.ends.insert(at, start + full.nbytes)
        self.buffers.insert(at, buffer)

    def forget(self, buffer: FlatBuffer) -> None:
        """A buffer was given back: its address may soon be that of other memory."""
        start = self._of.pop(id(buffer), None)
        if start is not None:
            at = self.starts.index(start)
            del self.starts[at], self.ends[at], self.buffers[at]
