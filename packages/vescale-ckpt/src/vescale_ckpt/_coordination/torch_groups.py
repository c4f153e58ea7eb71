"""Undocumented parts of torch that are used here: groups, and the stores behind them."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vescale_ckpt._coordination.meeting import Store
from vescale_ckpt._errors import CoordinationError

# Names that torch.distributed has and does not declare to type checkers.
_dist: Any = dist

# torch's own default for gloo. A rank that writes to a slow file system keeps the others waiting.
_TIMEOUT = timedelta(minutes=30)


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the store over which the members of a group found each other, if it can be polled.

    None where torch hides it, and for stores of other kinds than torch's own: in a simulated world
    ranks take turns, and one that polls keeps the others from running.
    """
    get_store = getattr(group, "get_group_store", None)
    try:
        store = get_store() if get_store is not None else None
    except RuntimeError:
        return None
    # A group's store is torch's store under prefixes; what is at the bottom decides whether it can
    # be polled. All ranks of a group have one kind, so all of them meet, or none does.
    innermost = store
    while isinstance(innermost, _dist.PrefixStore):
        innermost = innermost.underlying_store
    known = (_dist.TCPStore, _dist.FileStore, _dist.HashStore)
    found: Store | None = store if isinstance(innermost, known) else None
    return found


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Return the seconds that a group was made to wait, or None where torch does not tell.

    Its store may have another timeout: one that the user has made and passed keeps its own.
    """
    try:
        backend: Any = group._get_backend(device)
        found: timedelta = backend.options._timeout
        return found.total_seconds()
    except (AttributeError, RuntimeError):
        return None


def prefixed(prefix: str, store: Store) -> Store:
    """Return a store that prepends `prefix` to every key."""
    found: Store = _dist.PrefixStore(prefix, store)
    return found


def which_start() -> str:
    """Return which start of its processes torchrun counts, as it keeps their store after a failure.

    Empty elsewhere, and on several nodes, which count apart.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return f"/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if kept and alone else ""


def gloo_group(store: Store, rank: int, world_size: int) -> Any:
    """Make a gloo group that torch does not keep a record of.

    `new_group` counts groups, and names the next one by that count: where only members make one,
    as a part of the world does here, the counts of ranks go apart, and a later `new_group` waits
    for ever. This group has no name and is not counted.
    """
    try:
        return _dist.ProcessGroupGloo(store, rank, world_size, _TIMEOUT)
    except (AttributeError, RuntimeError) as error:
        raise CoordinationError(f"a gloo group for the background failed: {error}") from error
