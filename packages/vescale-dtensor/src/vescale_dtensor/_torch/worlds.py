"""Caches that hold device meshes: emptied when the process is in another world of process groups.

A mesh holds its process groups, and so their sockets and threads. After
`torch.distributed.destroy_process_group` nobody can use them, but the threads of gloo spin on the
closed connections for as long as something refers to the mesh. A cache therefore either refers to
meshes weakly, or is made with `cached`, or subscribes to `on_world_change`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from vescale_dtensor._torch.bounded_cache import Subscribers

P = ParamSpec("P")
T = TypeVar("T")

# Every cache that holds meshes, or what holds them, subscribes with the function that empties it.
# Such a cache is only ever an optimisation: emptying it on one rank alone costs that rank time.
on_world_change = Subscribers()


def cached(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate like `lru_cache(maxsize=most)` a function of what holds a mesh: a layout, a spec."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept: Any = lru_cache(maxsize=most)(function)
        on_world_change(kept.cache_clear)
        result: Callable[P, T] = kept
        return result

    return decorate


class _Seen:
    """The default process group when a layout was last made."""

    world: weakref.ref[Any] | None = None


def note_world() -> None:
    """Empty the caches if the default process group is another one than at the last call.

    Called for every layout that is made, and so before a new mesh is in any of the caches, and
    never in a call that is known. torch says nothing when a group is destroyed; so one world, the
    last, may be kept until the next begins.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    # The ranks of a simulation are threads with a world each, and neither sockets nor threads.
    if world is None or dist.get_backend(world) == "simulated":
        return
    before = _Seen.world
    if before is not None and before() is world:
        return
    _Seen.world = weakref.ref(world)
    if before is not None:
        on_world_change.notify()
        # Specs refer to themselves; without this their meshes would wait for a full collection.
        gc.collect()
