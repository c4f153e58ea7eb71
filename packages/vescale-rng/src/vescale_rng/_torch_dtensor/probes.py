"""Probes whether torch's public functions still call the private ones that hooks replace.

A name that is there is not enough: torch 2.14 kept a function that `checkpoint` had called before,
and called another one. What nobody calls hooks nothing, and the draws would be silently others.
"""

import inspect
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed import tensor as torch_tensor
from torch.nn import init
from torch.utils import checkpoint as checkpoints

REENTRANT, FRAMES = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
if hasattr(checkpoints, f"{FRAMES}_impl"):  # what both the former and `checkpoint` itself call
    FRAMES += "_impl"
TRUNCATED, BORN = "_no_grad_trunc_normal_", "_dtensor_init_helper"


@cache
def missing(frames: str, reentrant: str, truncated: str, born: str) -> tuple[str, ...]:
    """The hooks, by the names of what they replace, that the installed torch would never reach."""
    api: Any = getattr(torch_tensor, "_api", None)
    # Without the wrapper that keeps compilers away, whose first call would import a compiler.
    checkpoint = inspect.unwrap(checkpoints.checkpoint)
    one = torch.empty(1, device="cpu")
    probes: list[tuple[Any, str, Callable[[], Any]]] = [
        (checkpoints, frames, lambda: checkpoint(_same, one, use_reentrant=False)),
        (checkpoints, reentrant, lambda: checkpoint(_same, one, use_reentrant=True)),
        (init, truncated, lambda: init.trunc_normal_(one)),
        (api, born, lambda: torch_tensor.rand(1)),
    ]
    lacking = [(place, name) for place, name, call in probes if not _reaches(place, name, call)]
    return tuple(f"{getattr(place, '__name__', 'torch')}.{name}" for place, name in lacking)


def _same(tensor: Any) -> Any:
    return tensor


class _ReachedError(Exception):
    """Ends a call where it reaches what was put in the way."""


def _reaches(place: Any, name: str, call: Callable[[], Any]) -> bool:
    """Whether a call, in the end, calls `place.name`, or `place.name.apply` of a class."""
    before: Any = getattr(place, name, None)
    if before is None:
        return False
    mine = threading.get_ident()

    def stop(function: Any, *args: Any, **kwargs: Any) -> Any:
        # Other threads may use it meanwhile.
        if threading.get_ident() != mine:
            return function(*args, **kwargs)
        raise _ReachedError

    class Stop:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return stop(before, *args, **kwargs)

        def apply(self, *args: Any) -> Any:
            return stop(before.apply, *args)

    setattr(place, name, Stop())
    try:
        call()
    except _ReachedError:
        return True
    except Exception:
        # It ended for a reason of its own, before it came there.
        return False
    finally:
        setattr(place, name, before)
    return False
