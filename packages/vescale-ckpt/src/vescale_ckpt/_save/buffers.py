"""Host memory that a state is copied into, so that training may change it while it is written."""

import threading
from collections import defaultdict

import torch

from vescale_ckpt._errors import CheckpointError


class Buffers:
    """Reused host memory of at most `max_bytes`; asking for more waits until some comes back."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.allocated = 0
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = defaultdict(list)
        self._changed = threading.Condition()
        self._closed: BaseException | None = None

    def acquire(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return a uint8 tensor of `nbytes`; raise what `fail` was told, if that happens first."""
        key = (nbytes, pinned)
        with self._changed:
            while not self._free[key]:
                if self._closed is not None:
                    raise CheckpointError(f"the save has failed: {self._closed}")
                if self.allocated and self.allocated + nbytes > self.max_bytes:
                    # Sizes change rarely: of what is free now, nothing fits.
                    if not self._drop_free():
                        self._changed.wait()
                    continue
                self.allocated += nbytes
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            return self._free[key].pop()

    def release(self, buffer: torch.Tensor, *, pinned: bool) -> None:
        """Give a buffer back."""
        with self._changed:
            self._free[buffer.numel(), pinned].append(buffer)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Wake who waits: nothing will come back."""
        with self._changed:
            self._closed = error
            self._changed.notify_all()

    def reopen(self) -> None:
        """Begin another save. Buffers that a failed one held are forgotten."""
        with self._changed:
            self._closed = None
            self.allocated = sum(b.numel() for free in self._free.values() for b in free)

    def _drop_free(self) -> bool:
        dropped = sum(b.numel() for free in self._free.values() for b in free)
        self._free.clear()
        self.allocated -= dropped
        return dropped > 0
