"""`async_save`: agree and copy in the foreground, write and commit in the background."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from vescale_ckpt._coordination.coordinator import Coordinator, coordinator_of
from vescale_ckpt._progress import Progress
from vescale_ckpt._save.buffers import Buffers
from vescale_ckpt._save.commit import Place
from vescale_ckpt._save.replan_cache import (
    Held,
    Known,
    common_generation,
    hold,
    known_from,
    settle,
    word_of,
)
from vescale_ckpt._save.save import (
    Begun,
    SaveOptions,
    begin,
    discarded_on_failure,
    finish,
    finish_here,
    place_of,
)
from vescale_ckpt._save.staging_queue import Belt
from vescale_ckpt._storage.base import Storage
from vescale_ckpt._storage.resolve import storage_of

_DEFAULT_BYTES = 8 << 30


class Staging:
    """What asynchronous saves share: host buffers, a way to talk, and the save under way.

    Pass one to every `async_save` of a run: buffers are then reused, and a save first waits for
    the one before it, and raises its error. A state that is laid out as the last one was, on every
    rank, goes by the same plan: then the ranks need not wait for each other before they copy.

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
        self._channels: list[_Channel] = []
        self._pending: SaveHandle | None = None

    def wait(self) -> None:
        """Wait for the save under way, if there is one; raises its error, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def channel(self, coordinator: Coordinator) -> "_Channel":
        """What these ranks have here."""
        for channel in self._channels:
            if channel.foreground == coordinator:
                return channel
        self._channels.append(_Channel(coordinator))
        return self._channels[-1]

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in the background, after what runs there now."""
        self._writer.submit(work)

    def take(self, handle: "SaveHandle") -> None:
        """Remember the save under way."""
        self._pending = handle


@dataclass
class _Channel:
    """How the ranks of one group talk, and what they know of each other's states."""

    foreground: Coordinator
    # The same ranks, through a group that only the background uses.
    background: Coordinator | None = None
    known: Known | None = None

    def learn(self, begun: Begun) -> None:
        """Keep what was agreed on. Called by all, or none."""
        if self.background is None:
            self.background = self.foreground.background()
        self.known = known_from(begun)


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
    with the same `staging`. Values and copies that differ between ranks may be found here or
    later. A process that dies loses this checkpoint only. In the background the ranks talk through
    a gloo group of their own: wait before you destroy the process group. Where several ranks are
    threads of one process (a simulated world), all is done when this returns.

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
    channel = staging.channel(coordinator)
    saving = _Saving(storage, coordinator, staging, channel, options)
    begun, belt, held = saving.agree(place_of(storage, path), state)
    handle = SaveHandle(begun.place.target)
    if not begun.agreed.apart:
        # Where ranks are threads that take turns nothing goes on behind them: it is written now.
        finish_here(storage, coordinator, begun, options.progress)
        handle.end(None)
    else:
        handle.staged_bytes = belt.nbytes
        saving.start(begun, belt, held, handle)
    handle.blocked_seconds = time.perf_counter() - began
    if belt.interrupt is not None:
        raise belt.interrupt
    return handle


@dataclass(frozen=True)
class _Saving:
    """One asynchronous save."""

    storage: Storage
    coordinator: Coordinator
    staging: Staging
    channel: _Channel
    options: SaveOptions

    def agree(self, place: Place, state: dict[Any, Any]) -> tuple[Begun, Belt, Held | None]:
        """By the plan of before, if it holds for all ranks; otherwise anew."""
        known, rank = self.channel.known, self.coordinator.rank
        held = hold(self.storage, self.coordinator, place, state, self.options, known)
        told = self.coordinator.start(word_of(known, held, place))
        belt: Belt | None = None
        if known is not None and held is not None:
            belt = Belt(self.staging.buffers, held.sources, known.agreed.plan.pieces[rank])
            # While the word is on its way. Where not all of it fits, writing has to begin first.
            if belt.fits:
                belt.load()
        with discarded_on_failure(self.storage, self.coordinator, place):
            generation = common_generation(told())
        if known is None or held is None or belt is None or generation is None:
            return *self._agree_anew(place, state, belt), None
        place = place._replace(generation=generation)
        notes = self.options.notes
        return Begun(place, known.agreed, held.tree, held.sources, notes), belt, held

    def _agree_anew(
        self, place: Place, state: dict[Any, Any], vain: Belt | None
    ) -> tuple[Begun, Belt]:
        if vain is not None:
            vain.unload()
        begun = begin(self.storage, self.coordinator, place, state, self.options)
        if begun.agreed.apart:
            with discarded_on_failure(self.storage, self.coordinator, begun.place):
                self.channel.learn(begun)
        pieces = begun.agreed.plan.pieces[self.coordinator.rank]
        belt = Belt(self.staging.buffers, begun.sources, pieces)
        belt.interrupt = vain.interrupt if vain is not None else None
        return begun, belt

    def start(self, begun: Begun, belt: Belt, held: Held | None, handle: SaveHandle) -> None:
        """Have it written in the background, and everything copied when this returns."""
        self.staging.take(handle)
        # Where not all of it fits, buffers must come back while it is copied. Else writing waits:
        # it would take processor time and memory bandwidth from the copy.
        if belt.fits and not belt.loaded:
            belt.load()
        self.staging.start(lambda: self._write(begun, belt, held, handle))
        if not belt.loaded:
            belt.load()

    def _write(self, begun: Begun, belt: Belt, held: Held | None, handle: SaveHandle) -> None:
        background = self.channel.background
        assert background is not None
        try:
            if held is not None:
                with discarded_on_failure(self.storage, background, begun.place):
                    begun = settle(background, begun, held.digests)
            tell = self.options.progress
            finish(self.storage, background, begun, [belt.pieces], belt.data, belt.done, tell)
        except Exception as error:
            self.staging.buffers.fail(error)
            handle.end(error)
        else:
            handle.end(None)
