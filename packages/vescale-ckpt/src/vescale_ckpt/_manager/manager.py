"""A directory of checkpoints by training step: the newest, and how many to keep."""

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from vescale_ckpt._coordination.coordinator import (
    Coordinator,
    all_or_none,
    meet_after,
    report_if_it_fails,
)
from vescale_ckpt._coordination.groups import coordinator_of
from vescale_ckpt._coordination.meeting import Call, call_of
from vescale_ckpt._errors import (
    CheckpointError,
    CorruptError,
    ExistsError,
    FormatError,
    MismatchError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from vescale_ckpt._format import strict_json
from vescale_ckpt._format.manifest import COMMIT
from vescale_ckpt._format.parse import is_generation
from vescale_ckpt._load.load import LoadOptions, StateT, load_with
from vescale_ckpt._load.open import read_manifest
from vescale_ckpt._manager.provenance import (
    METRIC,
    ORDER,
    Provenance,
    by_age,
    damaged_in,
    is_healthy,
    metrics_of,
    newest_of,
    order_of,
    unhealthy_in,
)
from vescale_ckpt._manager.retention import Policy
from vescale_ckpt._progress import Progress
from vescale_ckpt._save.async_save import SaveHandle, Staging, async_save_with
from vescale_ckpt._save.save import HEALTHY, SaveOptions, save_with
from vescale_ckpt._storage.base import remove_tree
from vescale_ckpt._storage.commit_lookup import has_commit, is_committed, read_commit
from vescale_ckpt._storage.directory_lock import Hold, hold
from vescale_ckpt._storage.resolve import resolve, storage_of

_log = logging.getLogger("vescale_ckpt")

_DAMAGED = (CorruptError, FormatError)

_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
# Leftovers of a save that never ended, or of a removal that was interrupted.
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(saving|removing)(-g-[0-9a-f]{16})?", re.ASCII)


class CheckpointManager:
    """Checkpoints of one training run: `root/step-00000100` and so on.

    One job at a time writes into a root, through one manager; on a local file system another one
    is refused. Where torch.distributed is initialised, `save` and `restore` are collective calls
    over `group`; `latest` and `steps` are not.

    Args:
        root: The directory that holds the checkpoints; made by the first save.
        keep_last: How many of the newest to keep, those that were saved last; at least 1.
        keep_every: Keep every step that is a multiple of this.
        keep_best: How many with the best `metric` to keep; see `save`.
        best: "min" if a smaller metric is better, "max" if a larger one is.
        group: The ranks that save and restore together.
        timeout: Seconds to wait for ranks that have not made a call; after 30 they are named. By
            default as many as the process group was made with, and 600 at most.

    What any of them wants is kept; without any of them, everything is. The one that was just
    saved is always kept, and others go only after it counts. One that is not healthy, because
    `save` was told so or given a metric that is nan or infinite, pushes out no other and replaces
    none; it goes with the next save, and `restore` passes it over. One whose manifest is damaged
    pushes out none either, and is never removed. What this manager has passed over as damaged is
    replaced by a save of its step, also without `overwrite`. One that needs a newer release of this
    package, or xxhash where that is missing, is an `UnsupportedError` in all but `steps` and
    `restore(step=)`: it is not damaged, and may be the newest.

    The newest is the one that was saved last: after `restore(step=50)` the next save is newer than
    the steps 100 and 110 of before.

    Examples:
        >>> import tempfile, torch
        >>> manager = CheckpointManager(tempfile.mkdtemp(), keep_last=2)
        >>> for step in (100, 200, 300):
        ...     manager.save(step, {"weight": torch.full((2,), float(step))})
        >>> manager.steps()
        [200, 300]
        >>> manager.restore(into={"weight": torch.zeros(2)})
        {'weight': tensor([300., 300.])}
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best: str = "min",
        group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
    ) -> None:
        self.root = resolve(root)
        self._policy = Policy(keep_last, keep_every, keep_best, best)
        self._group, self._timeout = group, timeout
        self._storage = storage_of(root)
        self._staging = Staging()
        # The step of an asynchronous save after which nothing was pruned yet, and the ranks that
        # have saved it.
        self._saving: tuple[int, Coordinator] | None = None
        # How many saves there were into the root; not known before the first one here.
        self._saves: int | None = None
        # Keeps other runs from saving into a local root, from the second save on.
        self._hold: Hold | None = None
        # Damaged ones that were told of, and that a save of their step may replace.
        self._passed_over: set[int] = set()
        # Generation and provenance by step; a replaced checkpoint has another generation.
        self._read: dict[int, tuple[str, dict[str, Any]]] = {}

    def path(self, step: int) -> str:
        """Return where the checkpoint of `step` is, or would be."""
        return f"{self.root}/step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, in ascending order."""
        if not self._storage.is_directory(self.root):
            return []
        names = self._storage.names_in(self.root)
        found = [int(m[1]) for m in map(_STEP.fullmatch, names) if m]
        return sorted(step for step in found if is_committed(self._storage, self.path(step)))

    def latest(self) -> int | None:
        """Return the committed step that was saved last, or None if there is none.

        Reads the manifests of all that this object does not know yet; `steps` reads none. One whose
        manifest is damaged is passed over, with a warning.
        """
        known = self._known()
        newest = newest_of(known)
        self._warn_of_damaged(known, newest)
        return newest

    def latest_healthy(self) -> int | None:
        """Return the last saved step that is sound and not known to be unhealthy, or None."""
        return newest_of(self._known(), is_healthy)

    def metrics(self) -> dict[int, float]:
        """Return the metric of every committed step that was saved with one."""
        return metrics_of(self._known())

    def _known(self) -> dict[int, Provenance]:
        """Return what all committed steps say of themselves, in ascending order."""
        known: dict[int, Provenance] = {}
        for step in self.steps():
            try:
                known[step] = self._provenance(step)
            except StorageError:
                # In an outage nobody knows which is the newest. Or it has just been removed.
                if is_committed(self._storage, self.path(step)):
                    raise
        return known

    def _provenance(self, step: int) -> Provenance:
        """Return what the manifest of a step says about its origin: read once for a generation."""
        path = self.path(step)
        try:
            commit = read_commit(self._storage, path)
            generation, provenance = self._read.get(step, ("", {}))
            if generation != commit.generation:
                # Not the sizes of the data files: those are two questions for each rank's file.
                provenance = read_manifest(self._storage, path, commit).provenance
                self._read[step] = commit.generation, provenance
        except StorageError:
            raise
        except UnsupportedError as error:  # it may be the newest, and sound
            raise UnsupportedError(
                f"{path}: {error}. No other is taken for the newest: restore one by `step`, or "
                "move this one out of the way"
            ) from error
        except CheckpointError:
            return None
        return provenance

    def save(
        self,
        step: int,
        state: dict[Any, Any],
        *,
        overwrite: bool = False,
        metric: float | None = None,
        healthy: bool | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Save `state` as the checkpoint of `step`, then remove those that need not be kept.

        Args:
            step: The training step; at least 0.
            state: What to save, as for `vescale_ckpt.save`.
            overwrite: Replace the checkpoint of this step.
            metric: What `keep_best` compares, such as the validation loss. Of rank 0.
            healthy: Whether training can go on from this state; the checkpoint is if all ranks say
                so. By default it is, unless `metric` is nan or infinite.
            progress: Called with (bytes written, bytes to write) of this rank.

        Raises:
            ExistsError: A healthy checkpoint of this step is there and this one is not healthy,
                whatever `overwrite` says; or any is and `overwrite` is not given.
            CheckpointError: As `save` does; then nothing was removed. Or the checkpoint is there
                and an older one could not be removed: the message says which.
        """
        # An asynchronous save of this manager first: one save at a time, so pruning meets no
        # other's files.
        self.wait()
        coordinator, call = self._begin("save", step)
        options = meet_after(
            coordinator,
            call,
            lambda: self._options(coordinator.rank, step, overwrite, metric, healthy, progress),
        )
        # Committed first, pruned after: a crash between the two leaves one too many, never too few.
        save_with(self._storage, coordinator, self.path(step), state, options)
        self._pruned_after(step)

    def async_save(
        self,
        step: int,
        state: dict[Any, Any],
        *,
        overwrite: bool = False,
        metric: float | None = None,
        healthy: bool | None = None,
        progress: Progress | None = None,
    ) -> SaveHandle:
        """Save as `save` does, in the background: `state` may change when this returns.

        It first waits for the save before it, and raises its error. What need not be kept is
        removed by the next `save`, `async_save`, `restore` or `wait`.
        """
        self.wait()
        coordinator, call = self._begin("async_save", step)
        asked = (coordinator.rank, step, overwrite, metric, healthy, progress)
        options = report_if_it_fails(coordinator, call, lambda: self._options(*asked))
        path, staging = self.path(step), self._staging
        handle = async_save_with(self._storage, coordinator, path, state, options, staging, call)
        # Only after the save has begun: if it was refused, there is nothing to prune after.
        self._saving = step, coordinator
        return handle

    def wait(self) -> None:
        """Wait for the save under way, if there is one; raises its error, once. Collective."""
        saving, self._saving = self._saving, None
        # Ended alike on all ranks, so all of them go on to the next line, or raise here.
        self._staging.wait()
        if saving is None:
            return
        step, ranks = saving
        coordinator, call = self._begin("wait", step)
        # In a world that was made again there may be ranks that know nothing of it: then the next
        # save prunes.
        if coordinator == ranks:
            # The ranks may reach this at different times: they meet before the collective in
            # `_pruned_after`.
            coordinator.meet(call)()
            self._pruned_after(step)

    def _begin(self, name: str, subject: object) -> tuple[Coordinator, Call]:
        """Describe a collective call of this manager, for ranks that wait for others in it."""
        return coordinator_of(self._group), call_of(
            f"CheckpointManager.{name}", subject, self._timeout
        )

    def _pruned_after(self, step: int) -> None:
        coordinator = coordinator_of(self._group)
        # Rank 0 removes, and the others learn whether it could: the file system is shared.
        all_or_none(coordinator, lambda: self._prune(step) if coordinator.rank == 0 else None)
        self._passed_over.discard(step)

    def _options(
        self,
        rank: int,
        step: int,
        overwrite: bool,
        metric: float | None,
        healthy: bool | None,
        progress: Progress | None,
    ) -> SaveOptions:
        if step < 0:
            raise ValueError(f"a step is at least 0, not {step}")
        notes = {} if metric is None else {METRIC: strict_json.number(metric)}
        notes |= {} if healthy is None else {HEALTHY: healthy}
        fit = is_healthy(notes)
        if overwrite and not fit:
            self._refuse_to_replace(step)
        overwrite |= step in self._passed_over
        if rank == 0:  # whose notes are written
            if self._storage.renames and self._storage.is_directory(self.root):
                self._hold = hold(self.root)
            notes[ORDER] = self._next_order()
        else:
            # It may be rank 0 in a later world, as another one is now.
            self._saves = self._hold = None
        return SaveOptions(overwrite=overwrite, progress=progress, notes=notes, healthy=fit)

    def _next_order(self) -> int:
        if self._saves is None:
            self._saves = max(map(order_of, self._known().values()), default=0)
        self._saves += 1
        return self._saves

    def _refuse_to_replace(self, step: int) -> None:
        """Raise if there is a healthy checkpoint of this step: what is unhealthy replaces none."""
        if is_committed(self._storage, self.path(step)) and is_healthy(self._provenance(step)):
            raise ExistsError(
                f"{self.path(step)} is a healthy checkpoint, and the one to replace it is not: "
                "save it as another step, or pass healthy=True"
            )

    def restore(
        self, into: StateT, *, step: int | None = None, progress: Progress | None = None
    ) -> StateT:
        """Load the newest healthy checkpoint, or that of `step`; as `load`, always strict.

        Where data of the newest is damaged, the one before it is loaded, with a warning.

        Args:
            into: Where to load to.
            step: Which checkpoint, healthy or not; by default the newest that is healthy.
            progress: Called with (bytes read, bytes to read) of this rank.

        Raises:
            NotFoundError: There is no committed checkpoint, or none that is healthy.
            CorruptError: All there are, but for unhealthy ones, are damaged.
            CheckpointError: As `load` does; for damage only of a `step` that was asked for.
        """
        self.wait()
        coordinator, call = self._begin("restore", step)
        # Met once here; `load_with` below then uses collectives without a meeting of its own.
        coordinator.meet(call)()
        options, damaged = LoadOptions(progress=progress), set[int]()
        while True:
            chosen = self._agreed_choice(coordinator, step, damaged)
            path = self.path(chosen)
            try:
                restored: StateT = load_with(self._storage, coordinator, path, into, options)
            except _DAMAGED as error:  # on all ranks, or on none
                if step is not None or isinstance(error, UnsupportedError):
                    raise
                damaged.add(chosen)
                self._passed_over.add(chosen)
                if coordinator.rank == 0:
                    _log.warning("%s is damaged, and is passed over: %s", path, error)
            else:
                return restored

    def _agreed_choice(self, coordinator: Coordinator, step: int | None, damaged: set[int]) -> int:
        """Return which checkpoint all ranks restore; `damaged` are those that failed to load."""
        told = all_or_none(coordinator, lambda: self._choice(coordinator.rank, step, damaged))
        asked = [answer[0] for answer in told]
        if len(set(asked)) > 1:
            raise MismatchError(f"ranks restore different steps: {asked}")
        # Rank 0 decides: a network file system may show the others an older picture.
        _, chosen, unhealthy, unsound = told[0]
        if chosen is None:
            others = f"; by `step` an unhealthy one can be: {unhealthy}" if unhealthy else ""
            if unsound:  # no beginning of a run: nobody should train on from here unasked
                others += "; `into` may hold parts of them" if damaged else ""
                raise CorruptError(
                    f"no checkpoint in {self.root} loads; damaged: {unsound}{others}"
                )
            raise NotFoundError(f"there is no committed checkpoint in {self.root}{others}")
        return int(chosen)

    def _choice(self, rank: int, step: int | None, damaged: set[int]) -> list[Any]:
        """Return the step that was asked for, the one to restore; unhealthy and damaged ones."""
        # Rank 0 decides; the others need not read all manifests for it.
        if step is not None or rank != 0:
            return [step, step, [], []]
        known = self._known() | dict.fromkeys(damaged)
        chosen = newest_of(known, is_healthy)
        if chosen is None:
            return [None, None, sorted(unhealthy_in(known)), damaged_in(known)]
        self._warn_of_damaged(known, chosen)
        return [None, chosen, [], []]

    def _warn_of_damaged(self, known: Mapping[int, Provenance], newest: int | None) -> None:
        """Name those that would be newer, each once."""
        ages = by_age(known)
        newer = ages if newest is None else ages[ages.index(newest) + 1 :]
        for step in newer:
            if known[step] is None and step not in self._passed_over:
                self._passed_over.add(step)
                _log.warning("%s is damaged, and is passed over", self.path(step))

    def _prune(self, just_saved: int) -> None:
        # Nothing is removed unless the checkpoint that was just saved is there, and not damaged.
        there = is_committed(self._storage, self.path(just_saved))
        if there and self._provenance(just_saved) is not None:
            for step in self._not_kept(just_saved):
                self._remove(step)
            if not self._storage.renames:
                self._remove_other_generations(just_saved)
        if not self._storage.renames:
            self._remove_uncommitted(just_saved)
        # Only hidden names that a save or a removal of this class makes; everything else is the
        # user's.
        for name in self._storage.names_in(self.root):
            if _LEFTOVER.fullmatch(name):
                remove_tree(self._storage, f"{self.root}/{name}")

    def _not_kept(self, just_saved: int) -> list[int]:
        # Then there may be thousands, and none of them need be looked at.
        if self._policy.keeps_all:
            return []
        # What is damaged counts for nothing; but that is no reason to remove it.
        sound = {step: one for step, one in self._known().items() if one is not None}
        kept = self._policy.kept(by_age(sound), just_saved, metrics_of(sound), unhealthy_in(sound))
        return [step for step in sound if step not in kept]

    def _remove_uncommitted(self, just_saved: int) -> None:
        """Remove what a save that died has written to an object store, at its final path."""
        for match in map(_STEP.fullmatch, self._storage.names_in(self.root)):
            step = int(match[1]) if match else just_saved
            # What was read was committed; only `_remove` takes that back.
            if match and step != just_saved and step not in self._read:
                path = f"{self.root}/{match[0]}"
                if self._storage.is_directory(path) and not has_commit(self._storage, path):
                    remove_tree(self._storage, path)

    def _remove_other_generations(self, just_saved: int) -> None:
        """Remove what saves that died have written beside the one that counts now."""
        path = self.path(just_saved)
        counts = read_commit(self._storage, path).generation
        for name in self._storage.names_in(path):
            if is_generation(name) and name != counts:
                remove_tree(self._storage, f"{path}/{name}")

    def _remove(self, step: int) -> None:
        self._read.pop(step, None)
        # First what makes it count, COMMIT or the name: a checkpoint is never seen half removed. A
        # crash in between leaves a leftover, which the next pruning removes.
        if not self._storage.renames:
            self._storage.remove_file(f"{self.path(step)}/{COMMIT}")
            remove_tree(self._storage, self.path(step))
            return
        removing = f"{self.root}/.step-{step:08d}.removing"
        if self._storage.exists(removing):
            remove_tree(self._storage, removing)
        self._storage.rename(self.path(step), removing)
