"""Processes that a rank forks, such as the workers of a DataLoader, are no ranks.

They inherit its tensors, its groups and its sockets. A collective there would wait for ever, and
take from the sockets what belongs to the rank. So from the fork on every use of a DTensor is an
error, at once. A process that makes a process group of its own is a rank again.
"""

from __future__ import annotations

import os
from functools import cache

import torch.distributed as dist
from torch.utils.data import get_worker_info

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._redistribute.plan import RedistributionPlan
from vescale_dtensor._tensor.observers import Observer, observers


class _Forked(Observer):
    """Stands among those who watch, so that no call takes the fast path past `refuse`."""

    def __init__(self, inherited: object) -> None:
        self.inherited = inherited

    def on_redistribute(self, plan: RedistributionPlan, backward: bool) -> None:
        """Refuse to redistribute: it would communicate."""
        self.refuse("redistribute")

    def refuse(self, what: str) -> None:
        """Raise where the process group is still the one that was inherited.

        Raises:
            UnsupportedError: it is.
        """
        if not dist.is_initialized() or dist.group.WORLD is not self.inherited:
            observers.remove(self)
            return
        worker = get_worker_info()
        which = (
            "a process that a rank forked" if worker is None else f"DataLoader worker {worker.id}"
        )
        raise UnsupportedError(
            f"{what} with DTensors in {which}: it is no rank, and would wait for the others for "
            "ever. Let datasets and collate functions work on plain tensors, and distribute the "
            "batch in the training loop; num_workers=0 loads in the rank itself."
        )


def refuse_if_forked(what: str) -> None:
    """Notice that this process is no rank; from the first call on, notice forks.

    Raises:
        UnsupportedError: it was forked by a rank.
    """
    _notice_forks()
    for watcher in tuple(observers):
        if isinstance(watcher, _Forked):
            watcher.refuse(what)


@cache
def _notice_forks() -> None:
    # At the first DTensor, not at import, which has no effects.
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    if dist.is_initialized():
        observers[:] = [_Forked(dist.group.WORLD)]
