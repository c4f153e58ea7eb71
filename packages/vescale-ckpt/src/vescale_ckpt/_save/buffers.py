"""Host memory into which a state is copied, so that training may change it while it is written."""

import threading
from collections import defaultdict

import torch

from vescale_ckpt._errors import CheckpointError


class Buffers:
    """Reused host memory of at most `max_bytes`; asking for more waits until some is given back.

    Shared by two threads: the caller acquires, the writing thread releases.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.allocated = 0
        # By size and kind: a state has the same sizes at every save, so the same buffers fit again.
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = defaultdict(list)
        # Guards everything below it, and is notified of every release and failure.
        self._changed = threading.Condition()
        self._closed: BaseException | None = None

    def acquire(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return a uint8 tensor of `nbytes`; raise what `fail` was given, if that happens first."""
        key = (nbytes, pinned)
        with self._changed:
            while not self._free[key]:
                # Checked before every wait: after a failure nothing will be given back.
                if self._closed is not None:
                    raise CheckpointError(f"the save has failed: {self._closed}")
                # A single buffer larger than the limit is still granted, when it is the only one.
                if self.allocated and self.allocated + nbytes > self.max_bytes:
                    # None of the free ones has this size. Sizes change rarely, so all of them are
                    # dropped, not the least recently used; only then is waiting worth it.
                    if not self._drop_free():
                        self._changed.wait()
                    continue
                self.allocated += nbytes
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned, device="cpu")
            return self._free[key].pop()

    def release(self, buffer: torch.Tensor, *, pinned: bool) -> None:
        """Give a buffer back."""
        with self._changed:
            self._free[buffer.numel(), pinned].append(buffer)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Wake the thread that waits for a buffer: none will be given back."""
        with self._changed:
            self._closed = error
            self._changed.notify_all()

    def reopen(self) -> None:
        """Begin another save; buffers that a failed one used are no longer counted."""
        with self._changed:
            self._closed = None
            self.allocated = sum(b.numel() for free in self._free.values() for b in free)

    def _drop_free(self) -> bool:
        """Free all unused buffers; return whether there were any."""
        dropped = sum(b.numel() for free in self._free.values() for b in free)
        self._free.clear()
        self.allocated -= dropped
        return dropped > 0
