"""A directory of checkpoints by training step: the newest, and how many to keep."""

import os
import re
from typing import Any, TypeVar

import torch.distributed as dist

from vescale_ckpt._commit import resolve
from vescale_ckpt._coordinator import coordinator_of, together
from vescale_ckpt._errors import NotFoundError
from vescale_ckpt._load import load
from vescale_ckpt._open import is_committed
from vescale_ckpt._save import save
from vescale_ckpt._storage import LocalStorage, remove_tree

_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
# Of a save that never ended, or of a removal that was cut short.
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(saving|removing)(-g-[0-9a-f]{16})?", re.ASCII)

State = TypeVar("State", bound=dict[Any, Any])


class CheckpointManager:
    """Checkpoints of one training run: `root/step-00000100` and so on.

    One job at a time writes into a root. Where torch.distributed is initialised, `save` and
    `restore` are collective calls over `group`; `latest` and `steps` are not.

    Args:
        root: The directory that holds the checkpoints; made by the first save.
        keep_last: How many of the newest to keep; at least 1, None keeps all. The one that was
            just saved is always kept, and older ones go only after it counts.
        group: The ranks that save and restore together.

    Example:
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
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1 or None, not {keep_last}")
        self.root = resolve(root)
        self.keep_last = keep_last
        self._group = group
        self._storage = LocalStorage()

    def path(self, step: int) -> str:
        """Where the checkpoint of `step` is, or would be."""
        return f"{self.root}/step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, oldest first."""
        if not self._storage.is_directory(self.root):
            return []
        names = self._storage.names_in(self.root)
        found = [int(m[1]) for m in map(_STEP.fullmatch, names) if m]
        return sorted(step for step in found if is_committed(self._storage, self.path(step)))

    def latest(self) -> int | None:
        """The newest committed step, or None if there is none."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: dict[Any, Any], *, overwrite: bool = False) -> None:
        """Save `state` as the checkpoint of `step`, then remove those that need not be kept.

        Raises:
            CheckpointError: As `save` does; then nothing was removed. Or the checkpoint is there
                and an older one could not be removed: the message says which.
        """
        if step < 0:
            raise ValueError(f"a step is at least 0, not {step}")
        # Committed first, pruned after: a crash between the two leaves one too many, never too few.
        save(self.path(step), state, overwrite=overwrite, group=self._group)
        coordinator = coordinator_of(self._group)
        together(coordinator, lambda: self._prune(step) if coordinator.rank == 0 else None)

    def restore(self, into: State, *, step: int | None = None) -> State:
        """Load the newest checkpoint, or that of `step`, into `into`; as `load`, always strict.

        Raises:
            NotFoundError: There is no committed checkpoint.
            CheckpointError: As `load` does.
        """
        if step is None:
            # Rank 0 decides: a file system may show the others an older picture.
            step = together(coordinator_of(self._group), self.latest)[0]
        if step is None:
            raise NotFoundError(f"there is no committed checkpoint in {self.root}")
        return load(self.path(step), into, group=self._group)

    def _prune(self, just_saved: int) -> None:
        steps = self.steps()
        # By step, except that the newest save stays even if it is of an older step: after a
        # restart from step 50 the old step 100 must not push out the new 60.
        kept = {just_saved} if self.keep_last is not None else set(steps)
        newest = [step for step in reversed(steps) if step != just_saved]
        kept.update(newest[: (self.keep_last or 1) - 1])
        # Nothing goes unless the one that replaces it is there.
        if just_saved in steps:
            for step in steps:
                if step not in kept:
                    self._remove(step)
        # Only names that a save or a removal of ours makes.
        for name in self._storage.names_in(self.root):
            if _LEFTOVER.fullmatch(name):
                remove_tree(self._storage, f"{self.root}/{name}")

    def _remove(self, step: int) -> None:
        # Out of sight first: a checkpoint is never seen half removed.
        removing = f"{self.root}/.step-{step:08d}.removing"
        if self._storage.exists(removing):
            remove_tree(self._storage, removing)
        self._storage.rename(self.path(step), removing)
