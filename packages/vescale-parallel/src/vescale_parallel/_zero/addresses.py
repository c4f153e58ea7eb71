"""Where in memory gathered buffers are: whose view a tensor is, found by its address."""

from __future__ import annotations

from bisect import insort

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
        # All three in one, and what they are made of.
        self._sorted: list[tuple[int, int, int]] = []
        self._of: dict[int, tuple[int, FlatBuffer]] = {}

    def note(self, buffer: FlatBuffer) -> None:
        """A buffer is gathered: it is where its `full` is, and nowhere else."""
        assert buffer.full is not None
        start = buffer.full.data_ptr()
        known = self._of.get(id(buffer))
        if known is not None:
            if known[0] == start:
                return
            self.forget(buffer)
        # What was at this address before is gone.
        if start in self.starts:
            for other in [one for at, one in self._of.values() if at == start]:
                self.forget(other)
        self._of[id(buffer)] = start, buffer
        insort(self._sorted, (start, start + buffer.full.nbytes, id(buffer)))
        self._list()

    def forget(self, buffer: FlatBuffer) -> None:
        """A buffer was given back: its address may soon be that of other memory."""
        key = id(buffer)
        if self._of.pop(key, None) is not None:
            self._sorted = [one for one in self._sorted if one[2] != key]
            self._list()

    def _list(self) -> None:
        self.starts = [start for start, _, _ in self._sorted]
        self.ends = [end for _, end, _ in self._sorted]
        self.buffers = [self._of[key][1] for _, _, key in self._sorted]
