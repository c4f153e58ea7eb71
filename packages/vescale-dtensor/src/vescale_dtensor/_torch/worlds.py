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

# Its functions have the process group that there is when it is imported as a default argument, for
# good. torch._dynamo imports it, and an optimizer's step imports that: with this, before any world.
import torch.distributed.nn.functional  # noqa: F401

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


class _SeenWorld:
    """The default process group when a layout was last made, and whether it was let go since."""

    world: weakref.ref[Any] | None = None
    let_go = False


def note_world() -> None:
    """Empty the caches if the default process group is another one than at the last call.

    Called for every layout that is made, and so before a new mesh is in any of the caches, and
    never in a call that is known.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    # The ranks of a simulation are threads with a world each, and neither sockets nor threads.
    if world is None or dist.get_backend(world) == "simulated":
        return
    before = _SeenWorld.world
    if before is not None and before() is world:
        return
    _SeenWorld.world, _SeenWorld.let_go = weakref.ref(world), False
    if before is None:
        gc.callbacks.append(_before_collection)
    else:
        on_world_change.notify()
        # Specs refer to themselves; without this their meshes would wait for a full collection.
        gc.collect()


def _before_collection(phase: str, info: dict[str, int]) -> None:
    """Empty the caches before a full collection of garbage, if the last world is gone.

    torch tells nobody that a group is destroyed, and no weak reference can: the meshes in the
    caches are what keeps it alive. So this is where the last world of a process is let go, without
    another one that replaces it, and the same collection frees it: `gc.collect()` does at once.
    """
    full = phase == "start" and info["generation"] == 2
    if full and not _SeenWorld.let_go and not dist.is_initialized():
        _SeenWorld.let_go = True
        on_world_change.notify()
