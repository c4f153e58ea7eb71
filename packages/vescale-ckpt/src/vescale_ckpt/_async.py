"""`async_save`: agree and copy in the foreground, write and commit in the background."""

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vescale_ckpt._coordinator import Coordinator, coordinator_of
from vescale_ckpt._errors import CheckpointError
from vescale_ckpt._places import storage_of
from vescale_ckpt._plan import Piece
from vescale_ckpt._progress import Progress
from vescale_ckpt._save import Begun, SaveOptions, begin, discarded_on_failure, finish, finish_here
from vescale_ckpt._staging import Buffers
from vescale_ckpt._storage import Storage
from vescale_ckpt._write import cut, in_one_file

_DEFAULT_BYTES = 8 << 30
# Of the bytes that may be in flight, a piece takes at most this share, so that copying and
# writing overlap.
_SHARE = 8


class Staging:
    """What asynchronous saves share: host buffers, a way to talk, and the save under way.

    Pass one to every `async_save` of a run: buffers are then reused, and a save first waits for
    the one before it, and raises its error.

    Args:
        max_bytes: Host memory of this rank that may be in flight. A state that is larger is
            copied as fast as it is written: `async_save` then blocks for longer.
    """

    def __init__(self, *, max_bytes: int = _DEFAULT_BYTES) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be positive, not {max_bytes}")
        self.buffers = Buffers(max_bytes)
        # Its thread is kept: starting one takes as long as copying megabytes. A program that ends
        # regularly waits for it, and so ends after its last checkpoint.
        self._writer = ThreadPoolExecutor(1, "vescale-ckpt-save")
        # A channel for every group of ranks that has saved with this. They are kept, not made anew
        # when the group changes: all members of a group must make its channel at the same save.
        self._background: list[tuple[Coordinator, Coordinator]] = []
        self._pending: SaveHandle | None = None

    def wait(self) -> None:
        """Wait for the save under way, if there is one; raises its error, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def background(self, coordinator: Coordinator) -> Coordinator:
        """The same ranks, through a channel that only the background uses."""
        for known, channel in self._background:
            if known == coordinator:
                return channel
        channel = coordinator.background()
        self._background.append((coordinator, channel))
        return channel

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in the background, after what runs there now."""
        self._writer.submit(work)

    def take(self, handle: "SaveHandle") -> None:
        """Remember the save under way."""
        self._pending = handle


class SaveHandle:
    """An asynchronous save. It counts once `wait` returns, or `done` says so.

    Attributes:
        path: Where the checkpoint is, or will be.
        blocked_seconds: How long `async_save` kept the caller.
        staged_bytes: How much of this rank's state was copied.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.blocked_seconds = 0.0
        self.staged_bytes = 0
        self._ended = threading.Event()
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether it has ended; raises its error if it failed."""
        if not self._ended.is_set():
            return False
        self.wait()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint counts.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Raises:
            TimeoutError: It has not ended yet. Waiting again is fine.
            CheckpointError: It failed, on every rank; nothing was committed.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"saving {self.path} has not ended after {timeout} s")
        if self._error is not None:
            raise self._error

    def end(self, error: Exception | None) -> None:
        """Called by the background, once."""
        self._error = error
        self._ended.set()


def async_save(
    path: str | os.PathLike[str],
    state: dict[Any, Any],
    *,
    overwrite: bool = False,
    check_replicas: bool = True,
    group: dist.ProcessGroup | None = None,
    staging: Staging | None = None,
    progress: Progress | None = None,
) -> SaveHandle:
    """Save `state` in the background: returns when it is copied, and may be changed again.

    As `save`, a collective call, and complete or absent. What cannot be saved at all, or where,
    raises here; what fails later raises on every rank from the handle, and from the next save
    with the same `staging`. A process that dies loses this checkpoint only. In the background the
    ranks talk through a gloo group of their own: wait before you destroy the process group. Where
    several ranks are threads of one process (a simulated world), all is done when this returns.

    Args:
        path: Where the checkpoint shall be.
        state: What to save, as for `save`.
        overwrite: Replace the checkpoint at `path`.
        check_replicas: Compare values, and small plain tensors, between ranks.
        group: The ranks that save together.
        staging: Buffers to reuse; see `Staging`. Without, they are made and freed every time.
        progress: Called by the background with (bytes written, bytes to write) of this rank.

    Raises:
        CheckpointError: On every rank: the state cannot be saved, or the save before it failed.

    Example:
        >>> import tempfile, torch, vescale_ckpt
        >>> path, weight = tempfile.mkdtemp() + "/step-1", torch.ones(2)
        >>> handle = vescale_ckpt.async_save(path, {"weight": weight})
        >>> _ = weight.zero_()
        >>> handle.wait()
        >>> vescale_ckpt.read(path)
        {'weight': tensor([1., 1.])}
    """
    options = SaveOptions(overwrite, check_replicas, progress)
    staging = staging or Staging()
    return async_save_with(storage_of(path), coordinator_of(group), path, state, options, staging)


def async_save_with(
    storage: Storage,
    coordinator: Coordinator,
    path: str | os.PathLike[str],
    state: dict[Any, Any],
    options: SaveOptions,
    staging: Staging,
) -> SaveHandle:
    """`async_save` on any storage, by any set of ranks."""
    began = time.perf_counter()
    staging.wait()
    staging.buffers.reopen()
    begun = begin(storage, coordinator, path, state, options)
    handle = SaveHandle(begun.place.target)
    if not begun.apart:
        return _at_once(storage, coordinator, begun, options, handle, began)
    with discarded_on_failure(storage, coordinator, begun.place):
        background = staging.background(coordinator)
    staging.take(handle)
    belt = _Belt(staging.buffers)
    pieces = in_one_file(
        part
        for piece in begun.plan.pieces[coordinator.rank]
        for part in cut(piece, max(1, staging.buffers.max_bytes // _SHARE))
    )

    def write() -> None:
        _in_background(storage, background, begun, belt, pieces, options.progress, handle)

    # Where not all of it fits, buffers must come back while it is copied. Else writing waits: it
    # would take processor time and memory bandwidth from the copy, which the caller waits for.
    at_once = sum(piece.nbytes for piece in pieces) > staging.buffers.max_bytes
    if at_once:
        staging.start(write)
    try:
        handle.staged_bytes = belt.load(pieces, begun)
    except BaseException as error:
        # The background raises it on every rank; here it is told to the caller by the handle.
        belt.stop(error)
        if not isinstance(error, Exception):
            raise
    finally:
        if not at_once:
            staging.start(write)
    handle.blocked_seconds = time.perf_counter() - began
    return handle


def _at_once(
    storage: Storage,
    coordinator: Coordinator,
    begun: Begun,
    options: SaveOptions,
    handle: SaveHandle,
    began: float,
) -> SaveHandle:
    """Where ranks are threads that take turns nothing goes on behind them: it is written now."""
    finish_here(storage, coordinator, begun, options.progress)
    handle.end(None)
    handle.blocked_seconds = time.perf_counter() - began
    return handle


def _in_background(
    storage: Storage,
    coordinator: Coordinator,
    begun: Begun,
    belt: "_Belt",
    pieces: list[Piece],
    progress: Progress | None,
    handle: SaveHandle,
) -> None:
    try:
        finish(storage, coordinator, begun, [pieces], belt.data, belt.done, progress)
    except Exception as error:
        belt.buffers.fail(error)
        handle.end(error)
    else:
        handle.end(None)


@dataclass(frozen=True)
class _Staged:
    """One piece in host memory; on its way there until `event`, if it comes from a device."""

    buffer: torch.Tensor
    pinned: bool
    event: torch.Event | None


class _Belt:
    """Pieces on their way from the caller, who copies them, to the background, which writes."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self._queue: queue.Queue[_Staged | BaseException] = queue.Queue()
        self._current: _Staged | None = None

    def load(self, pieces: list[Piece], begun: Begun) -> int:
        """Copy every piece, in order; returns the number of bytes. Afterwards all are copied."""
        last: torch.Event | None = None
        for piece in pieces:
            staged = self._copy(begun.sources.view(piece))
            last = staged.event or last
            self._queue.put(staged)
        if last is not None:
            last.synchronize()
        return sum(piece.nbytes for piece in pieces)

    def _copy(self, source: torch.Tensor) -> _Staged:
        pinned = source.device.type == "cuda"
        buffer = self.buffers.acquire(source.numel() * source.element_size(), pinned=pinned)
        buffer.view(source.dtype).view(source.shape).copy_(source, non_blocking=pinned)
        if not pinned:
            return _Staged(buffer, pinned, None)
        event = torch.Event(source.device)
        event.record(torch.cuda.current_stream(source.device))
        return _Staged(buffer, pinned, event)

    def stop(self, error: BaseException) -> None:
        """No more will come."""
        self._queue.put(error)

    def data(self, piece: Piece) -> memoryview:
        """The bytes of the next piece, once they are there."""
        staged = self._queue.get()
        if isinstance(staged, BaseException):
            raise CheckpointError(f"copying the state failed: {staged}") from staged
        if staged.event is not None:
            staged.event.synchronize()
        self._current = staged
        return staged.buffer.numpy().data

    def done(self, piece: Piece) -> None:
        """The bytes that `data` gave last are written."""
        assert self._current is not None
        self.buffers.release(self._current.buffer, pinned=self._current.pinned)
        self._current = None
