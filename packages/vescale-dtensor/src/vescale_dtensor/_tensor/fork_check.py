"""Refuses to use DTensors in processes that a rank has forked, such as workers of a DataLoader.

They inherit its tensors, process groups and sockets, but are not ranks: a collective there would
wait for ever, and would read data from the sockets that belongs to the rank. So after a fork every
use of a DTensor in the child is an error, at once. A process that initializes a process group of
its own is a rank again.
"""

from __future__ import annotations

import os
from functools import cache

import torch.distributed as dist
from torch.utils.data import get_worker_info

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._redistribute.plan import RedistributionPlan
from vescale_dtensor._tensor.observers import Observer, observers


class _ForkObserver(Observer):
    """An observer that refuses; while there is an observer, no call takes the fast path past it."""

    def __init__(self, inherited: object) -> None:
        self.inherited = inherited

    def on_redistribute(self, plan: RedistributionPlan, backward: bool) -> None:
        """Refuse to redistribute, which would communicate."""
        self.refuse("redistribute")

    def refuse(self, what: str) -> None:
        """Raise if the default process group is still the inherited one.

        Raises:
            UnsupportedError: it is.
        """
        if not dist.is_initialized() or dist.group.WORLD is not self.inherited:
            # The process has left the inherited group, or has one of its own: nothing to refuse any
            # more.
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
    """Raise if this process was forked by a rank; from the first call on, forks are noticed.

    Raises:
        UnsupportedError: it was forked by a rank.
    """
    _notice_forks()
    for watcher in tuple(observers):
        if isinstance(watcher, _ForkObserver):
            watcher.refuse(what)


@cache
def _notice_forks() -> None:
    """Register the fork handler, once per process."""
    # At the first DTensor and not at import, which has no side effects.
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """Runs in the child, right after the fork."""
    # Replaces the list's contents and not the list, which other modules have imported. Inherited
    # observers go: they belong to blocks that the child is not in.
    if dist.is_initialized():
        observers[:] = [_ForkObserver(dist.group.WORLD)]
