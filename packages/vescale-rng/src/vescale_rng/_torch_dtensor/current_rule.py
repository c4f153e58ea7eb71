"""Holds the rule of `consistent` that a thread follows, and whether one is at work."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vescale_rng._torch_dtensor.ops import Placing

_thread = threading.local()
# Outside of all blocks, as for a thread of autograd that recomputes: placements are all.
_default = Placing()


def placing() -> Placing:
    """Return what says which elements a DTensor holds: that of the innermost block here.

    In a thread of autograd, which entered no block, it is that of the mode that met the op.
    """
    blocks: list[Placing] = _blocks()
    return blocks[-1] if blocks else _default


def depth() -> int:
    """Return how many blocks this thread is in."""
    return len(_blocks())


@contextmanager
def in_force(rule: Placing) -> Iterator[None]:
    """Let `rule` place the tensors of this thread inside the `with` block."""
    blocks = _blocks()
    blocks.append(rule)
    try:
        yield
    finally:
        blocks.pop()


def batch_dim_inside() -> int | None:
    """Return which dim is the batch's inside of the function at hand, where that is known."""
    return getattr(_thread, "batch_dim", None)


@contextmanager
def batch_dim_is(dim: int) -> Iterator[None]:
    """Say which dim is the batch's of what is drawn inside of the `with` block."""
    before = batch_dim_inside()
    _thread.batch_dim = dim
    try:
        yield
    finally:
        _thread.batch_dim = before


def deciding() -> bool:
    """Tell whether a random op of this thread is drawn on purpose, and passes as it is.

    That is what a rule draws (the modes of outer blocks see it too), and what the functions of
    this package draw for a layout that their caller has given.
    """
    return getattr(_thread, "deciding", False) or _called_by_us()


@contextmanager
def decide() -> Iterator[None]:
    """Let every random op inside of the `with` block pass as it is."""
    # Not `deciding()`: that a function of ours is on the stack must not outlast it.
    before = getattr(_thread, "deciding", False)
    _thread.deciding = True
    try:
        yield
    finally:
        _thread.deciding = before


def _called_by_us() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__")
        # First what most frames of a deep model answer: this is asked at every draw.
        if name is not None and name.startswith("vescale_rng"):
            room = name.split(".")
            # No function of this package calls back into a program: a frame of ours draws for us.
            mine = room[0] == "vescale_rng"
            if mine and room[1:2] not in (["_torch_dtensor"], ["torch_dtensor"]):
                return True
        frame = frame.f_back
    return False


def _blocks() -> list[Any]:
    blocks: list[Any] | None = getattr(_thread, "blocks", None)
    if blocks is None:
        blocks = _thread.blocks = []
    return blocks
