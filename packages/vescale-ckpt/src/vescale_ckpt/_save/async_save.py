"""`async_save`: agree and copy in the foreground, write and commit in the background."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from vescale_ckpt._coordination.coordinator import Coordinator, nothing, report_if_it_fails
from vescale_ckpt._coordination.groups import coordinator_of, world_of_now
from vescale_ckpt._coordination.meeting import Call, call_of
from vescale_ckpt._errors import CheckpointError, as_checkpoint_error
from vescale_ckpt._progress import Progress
from vescale_ckpt._save.buffers import Buffers
from vescale_ckpt._save.commit import SaveLocation
from vescale_ckpt._save.replan_cache import (
    KnownSave,
    MatchingState,
    common_generation,
    encode_proposal,
    exchange_values,
    known_save_of,
    match_known,
)
from vescale_ckpt._save.save import (
    PreparedSave,
    SaveOptions,
    discarded_on_failure,
    location_of,
    prepare_save,
    write_and_commit,
    write_now,
)
from vescale_ckpt._save.staging_queue import StagingQueue
from vescale_ckpt._storage.base import Storage
from vescale_ckpt._storage.resolve import storage_of

_DEFAULT_BYTES = 8 << 30

_log = logging.getLogger("vescale_ckpt")


class Staging:
    """What asynchronous saves share: host buffers, a way to talk, and the save under way.

    Pass one to every `async_save` of a run: buffers are then reused, and a save first waits for
    the one before it, and raises its error. A state with the same layout as the last one, on every
    rank, goes by the same plan: then the ranks need not wait for each other before they copy.

    Args:
        max_bytes: Host memory of this rank that may be in flight. A state that is larger is
            copied as fast as it is written: `async_save` then blocks for longer.
    """

    def __init__(self, *, max_bytes: int = _DEFAULT_BYTES) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be positive, not {max_bytes}")
        self._set_up(max_bytes)

    def _set_up(self, max_bytes: int) -> None:
        self._process = os.getpid()
        self.buffers = Buffers(max_bytes)
        # One thread for all saves, so they are written and committed in the order of the calls. It
        # is kept, since starting one takes as long as copying megabytes. At exit, Python joins the
        # pool's threads, so a program ends after its last checkpoint.
        self._writer = ThreadPoolExecutor(1, "vescale-ckpt-save")
        # A channel for every group of ranks that has saved with this. Kept, not made anew when the
        # group changes: making one is collective, and ranks that disagree on when would wait for
        # each other.
        self._channels: list[_Channel] = []
        self._pending: SaveHandle | None = None

    def wait(self) -> None:
        """Wait for the save under way, if there is one; raises its error, once."""
        if self._process != os.getpid():
            # A fork has none of its parent's threads, and the save under way is the parent's.
            self._set_up(self.buffers.max_bytes)
        # Forgotten before waiting: an error is raised by one call only, not by all that follow.
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def channel(self, coordinator: Coordinator) -> "_Channel":
        """Return what these ranks have here, made at the first call."""
        # Of a world that is gone, on all ranks alike, nothing can be used, and background groups
        # have threads and connections.
        world = world_of_now()
        self._channels = [channel for channel in self._channels if channel.world is world]
        # Compared by group and not by ranks: one that was made anew needs a background group of its
        # own.
        for channel in self._channels:
            if channel.foreground == coordinator:
                return channel
        self._channels.append(_Channel(coordinator, world))
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
    # The default group of then.
    world: dist.ProcessGroup | None
    # The same ranks through a gloo group that only the background thread uses: collectives of two
    # threads on one group would pair up wrongly.
    background: Coordinator | None = None
    known: KnownSave | None = None

    def learn(self, prepared: PreparedSave) -> None:
        """Keep what was agreed on. Called by all, or none."""
        # Collective, and reached by all ranks or none: `prepare_save` has just ended alike on all.
        if self.background is None:
            self.background = self.foreground.background()
        self.known = known_save_of(prepared)


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
        # The event orders the two threads: `_error` is written before it is set, and read after.
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._notice = _FailureNotice()
        # Also when the program ends.
        weakref.finalize(self, self._notice.report)

    def done(self) -> bool:
        """Return whether it has ended; raises its error if it failed."""
        if not self._ended.is_set():
            self._notice.refuse_a_fork(self.path)
            return False
        self.wait()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint counts.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Raises:
            TimeoutError: It has not ended yet. Waiting again is fine.
            CheckpointError: It failed, on every rank; nothing was committed, unless the message
                says that it may be. Or it is that of the process from which this one was forked.
        """
        if not self._ended.is_set():
            self._notice.refuse_a_fork(self.path)
        if not self._ended.wait(timeout):
            raise TimeoutError(f"saving {self.path} has not ended after {timeout} s")
        if self._error is not None:
            self._notice.words = None
            raise self._error

    def end(self, error: Exception | None) -> None:
        """Record how it ended. Called by the background, once."""
        self._error = error
        try:
            if error is not None:
                # Said now, as it may take long until somebody waits for it.
                self._notice.words = f"the asynchronous save of {self.path} failed: {error}"
                _log.warning("%s", self._notice.words)
        finally:
            # Also where the user's log raises: somebody may wait already.
            self._ended.set()


class _FailureNotice:
    """Whether the failure of a save was raised; outlives its handle."""

    def __init__(self) -> None:
        self.process = os.getpid()
        # What nobody has been told yet.
        self.words: str | None = None

    def report(self) -> None:
        """Say what would get lost: nobody can wait for the save any more."""
        if self.words is not None and self.process == os.getpid():
            _log.error("%s; and nothing has waited for it", self.words)

    def refuse_a_fork(self, path: str) -> None:
        """Raise in a fork: the thread that would end the save is in another process."""
        if self.process != os.getpid():
            raise CheckpointError(
                f"{path} is being saved by process {self.process}, of which this one is a fork: "
                "wait for it there"
            )


def async_save(
    path: str | os.PathLike[str],
    state: dict[Any, Any],
    *,
    overwrite: bool = False,
    check_replicas: bool = True,
    group: dist.ProcessGroup | None = None,
    staging: Staging | None = None,
    progress: Progress | None = None,
    timeout: float | None = None,
) -> SaveHandle:
    """Save `state` in the background: returns when it is copied, and may be changed again.

    As `save`, a collective call, and complete or absent. What cannot be saved at all, or where,
    raises here; what fails later raises on every rank from the handle, and from the next save
    with the same `staging`. Values and copies that differ between ranks may be found here or
    later; where nobody waits for a save that failed, a warning is logged, and again at the end of
    the program. A process that dies loses this checkpoint only. In the background the ranks talk
    through a gloo group of their own: wait before you destroy the process group. Where several
    ranks are threads of one process (a simulated world), all is done when this returns.

    Args:
        path: Where the checkpoint shall be.
        state: What to save, as for `save`.
        overwrite: Replace the checkpoint at `path`.
        check_replicas: Compare values, and small plain tensors, between ranks.
        group: The ranks that save together.
        staging: Buffers to reuse; see `Staging`. Without, they are made and freed every time.
        progress: Called by the background with (bytes written, bytes to write) of this rank.
        timeout: Seconds to wait for ranks that have not called this; after 30 they are named. By
            default as many as the process group was made with, and 600 at most.

    Raises:
        CoordinationError: As `save` does.
        CheckpointError: On every rank: the state cannot be saved, or the save before it failed.

    Examples:
        >>> import tempfile, torch, vescale_ckpt
        >>> path, weight = tempfile.mkdtemp() + "/step-1", torch.ones(2)
        >>> handle = vescale_ckpt.async_save(path, {"weight": weight})
        >>> _ = weight.zero_()
        >>> handle.wait()
        >>> vescale_ckpt.read(path)
        {'weight': tensor([1., 1.])}
    """
    call = call_of("async_save", path, timeout)
    coordinator = coordinator_of(group)
    options = SaveOptions(overwrite, check_replicas, progress)
    storage = report_if_it_fails(coordinator, call, lambda: storage_of(path))
    staging = staging or Staging()
    return async_save_with(storage, coordinator, path, state, options, staging, call)


def async_save_with(
    storage: Storage,
    coordinator: Coordinator,
    path: str | os.PathLike[str],
    state: dict[Any, Any],
    options: SaveOptions,
    staging: Staging,
    call: Call | None = None,
) -> SaveHandle:
    """Run `async_save` on any storage, by any set of ranks."""
    began = time.perf_counter()
    # The save before has failed on all ranks or on none, so all of them raise here, or all go on.
    staging.wait()
    # Announces this rank in the store and does not wait yet: the others may come while it copies.
    arrived = nothing if call is None else coordinator.meet(call)
    # The background is idle here (`wait` above), so no thread holds or awaits a buffer.
    staging.buffers.reopen()
    channel = staging.channel(coordinator)
    saving = _AsyncSave(storage, coordinator, staging, channel, options, arrived)
    prepared, staged, matching = saving.agree(location_of(storage, path, options), state)
    handle = SaveHandle(prepared.location.target)
    if not prepared.agreed.own_processes:
        # Ranks that are threads of one process take turns and switch in collectives only, so a
        # background thread would never get one: written now.
        write_now(storage, coordinator, prepared, options.progress)
        handle.end(None)
    else:
        handle.staged_bytes = staged.nbytes
        saving.start(prepared, staged, matching, handle)
    handle.blocked_seconds = time.perf_counter() - began
    # A KeyboardInterrupt while copying: the other ranks have been told by now, so it may be raised.
    if staged.interrupt is not None:
        raise staged.interrupt
    return handle


@dataclass(frozen=True)
class _AsyncSave:
    """One asynchronous save."""

    storage: Storage
    coordinator: Coordinator
    staging: Staging
    channel: _Channel
    options: SaveOptions
    # Waits until all ranks have made the call: before the first collective, but after the copy.
    arrived: Callable[[], None]

    def agree(
        self, location: SaveLocation, state: dict[Any, Any]
    ) -> tuple[PreparedSave, StagingQueue, MatchingState | None]:
        """Agree by the plan of before, if it holds for all ranks; otherwise anew."""
        known, rank = self.channel.known, self.coordinator.rank
        # Local, and may fail on some ranks only: the proposal below tells the others whether it
        # did.
        matching = match_known(self.storage, self.coordinator, location, state, self.options, known)
        staged: StagingQueue | None = None
        if known is not None and matching is not None:
            staged = StagingQueue(
                self.staging.buffers, matching.local_tensors, known.agreed.plan.items[rank]
            )
            # Copied while other ranks are still on their way. Where not all of it fits, copying
            # would wait for buffers that only writing gives back, and writing has not begun.
            if staged.fits:
                staged.copy_all()
        # Rank 0 may have made its directory in `match_known` already.
        with discarded_on_failure(self.storage, self.coordinator, location):
            self.arrived()
            # Every rank comes here, with a plan or without one: the first collective of a save is
            # the same on all, and decides for all which way it goes.
            told = self.coordinator.exchange(encode_proposal(known, matching, location))
            generation = common_generation(told)
        # `generation` is None on all ranks or on none; where it is set, the others are set, too.
        if known is None or matching is None or staged is None or generation is None:
            return *self._agree_anew(location, state, staged), None
        location = location._replace(generation=generation)
        notes = self.options.notes
        return (
            PreparedSave(location, known.agreed, matching.tree, matching.local_tensors, notes),
            staged,
            matching,
        )

    def _agree_anew(
        self, location: SaveLocation, state: dict[Any, Any], unused: StagingQueue | None
    ) -> tuple[PreparedSave, StagingQueue]:
        # Copied for a plan that does not hold: its buffers would count as in use for ever.
        if unused is not None:
            unused.release_all()
        prepared = prepare_save(self.storage, self.coordinator, location, state, self.options)
        # Known from all answers, so all ranks make the background group, or none does.
        if prepared.agreed.own_processes:
            with discarded_on_failure(self.storage, self.coordinator, prepared.location):
                self.channel.learn(prepared)
        items = prepared.agreed.plan.items[self.coordinator.rank]
        staged = StagingQueue(self.staging.buffers, prepared.local_tensors, items)
        staged.interrupt = unused.interrupt if unused is not None else None
        return prepared, staged

    def start(
        self,
        prepared: PreparedSave,
        staged: StagingQueue,
        matching: MatchingState | None,
        handle: SaveHandle,
    ) -> None:
        """Have it written in the background, and everything copied when this returns."""
        # Before the thread starts: if copying is interrupted below, the next call still waits for
        # it.
        self.staging.take(handle)
        # Where not all of it fits, writing has to run while copying does, to give buffers back.
        # Otherwise it begins after the copy, which would share processor time and memory with it
        # bandwidth.
        if staged.fits and not staged.copied:
            staged.copy_all()
        self.staging.start(lambda: self._write(prepared, staged, matching, handle))
        if not staged.copied:
            staged.copy_all()

    def _write(
        self,
        prepared: PreparedSave,
        staged: StagingQueue,
        matching: MatchingState | None,
        handle: SaveHandle,
    ) -> None:
        background = self.channel.background
        # From here on another thread: it uses the background group only, never the caller's.
        assert background is not None
        try:
            if matching is not None:
                # What `prepare_save` compares in the foreground, before anything is written:
                # values, paths, digests of copies.
                with discarded_on_failure(self.storage, background, prepared.location):
                    prepared = exchange_values(
                        background, prepared, matching.digests, healthy=self.options.healthy
                    )
            tell = self.options.progress
            write_and_commit(
                self.storage, background, prepared, [staged.items], staged.data, staged.done, tell
            )
        except BaseException as error:
            # First the buffers: the caller may be waiting for one in `copy_all`, and nobody gives
            # any back now.
            self.staging.buffers.fail(error)
            # Also a SystemExit, of a user's `progress`: there is nothing above that would see it.
            handle.end(error if isinstance(error, Exception) else as_checkpoint_error(error))
        else:
            handle.end(None)
