"""Join plain results of custom autograd.Functions to the graph of the DTensors they came from.

Losses in chunks and kernels write their results into plain buffers. C++ records such a result as a
function of the wrappers, whose gradients would not reach the local tensors. `function_bridge` joins
a wrapper to the graph of the local tensors when it is first used, which never happens to a plain
tensor. So plain results are joined while `Function.apply` returns them. A profile function of this
thread sees that; it is set where the values of a DTensor become plain inside a forward, and is
removed with that forward.

A plain result is a replicated value, and so is its gradient.

From torch 2.14 on `Function.apply` is written in C, and a profile function sees no frame of it:
there `function_forwards` finds the results.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from vescale_dtensor._autograd.function_bridge import join_results
from vescale_dtensor._autograd.function_forwards import Forwards, running_forwards
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import apply_code
from vescale_dtensor._torch.worlds import on_world_change

logger = logging.getLogger("vescale_dtensor")

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_MOST_NOTES = 1000
_noted: set[tuple[str, tuple[Layout, ...]]] = set()
on_world_change(_noted.clear)  # layouts hold meshes


def _waiter() -> Any:
    """A profile function that waits for results."""
    return Forwards(_join_found) if apply_code is None else _Returns()


def note_plain_target(first: Any) -> None:
    """See `note_plain`: a plain tensor, or a list of them, may be written with DTensors."""
    if type(first) in (list, tuple):
        first = first[0] if first else None
    if type(first) in _PLAIN:
        note_plain()


def note_plain(shard: bool = False) -> None:
    """Values of a DTensor become plain, outside of autograd: in a Function's forward, perhaps.

    Args:
        shard: whether they are this rank's part only. What a Function makes of that nobody can
            type, so its plain results are left alone, and their backward is an error.
    """
    if torch.is_grad_enabled():
        return
    frames = running_forwards() if apply_code is None else _frames_of_functions()
    if not frames:
        return
    known = sys.getprofile()
    watch: Any = known or _waiter()
    if isinstance(watch, Forwards | _Returns):  # somebody else's stays; backward is an error then
        watch.note(frames, shard)  # first: one that waits for nothing leaves at its first event
    if known is None:
        sys.setprofile(watch)


def _frames_of_functions() -> list[FrameType]:
    """The calls of `Function.apply` that run in this thread."""
    found = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is apply_code:
            found.append(frame)
        frame = frame.f_back
    return found


class _Returns:
    """A profile function that waits until calls of `Function.apply` return.

    Attributes:
        of_shards: for each of them, whether a rank's part went into it.
    """

    def __init__(self) -> None:
        self.of_shards: dict[FrameType, bool] = {}

    def note(self, frames: Iterable[FrameType], shard: bool) -> None:
        """Wait for these calls, which use values of a DTensor, or of a rank's part of one."""
        for frame in frames:
            self.of_shards[frame] = self.of_shards.get(frame, False) or shard

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        """Join the results of a call that ends; one that raises has none."""
        if event != "return" or frame.f_code is not apply_code or frame not in self.of_shards:
            return
        of_shards = self.of_shards.pop(frame)
        if not self.of_shards:
            sys.setprofile(None)
        if not of_shards and result is not None:
            _join(frame.f_locals["cls"], frame.f_locals["args"], result)


def _join(function: type, operands: Sequence[Any], result: Any) -> None:
    """Join the results that want gradients, if one of them is plain and DTensors went in."""
    ours = [operand for operand in operands if isinstance(operand, DTensor)]
    results = result if isinstance(result, tuple) else (result,)
    plain = [r for r in results if type(r) in _PLAIN and _is_of_function(r)]
    if ours and plain:
        _join_plain(plain, results, operands)
        _note(function, ours)


def _join_found(results: Sequence[Tensor], operands: Sequence[Tensor]) -> None:
    """`_join` of what `function_forwards` found: results, and arguments that may be others."""
    plain = [r for r in results if type(r) in _PLAIN and _is_of_function(r)]
    if not plain:
        return
    node: Any = plain[0].grad_fn
    ours = _wrappers_behind(node)
    if ours:
        _join_plain(plain, results, operands)
        _note(type(node)._forward_cls, ours)


def _join_plain(plain: list[Tensor], results: Sequence[Any], operands: Sequence[Any]) -> None:
    node = plain[0].grad_fn
    wrapped = [r for r in results if isinstance(r, DTensor) and r.grad_fn is node]
    join_results(node, [*plain, *wrapped], [t for t in operands if type(t) in _PLAIN])


def _wrappers_behind(node: Any) -> list[DTensor]:
    """The DTensors that went into a Function, or a chain of them, and want gradients."""
    nodes = [node]
    found: dict[int, DTensor] = {}
    for current in nodes:  # which grows
        for after, _ in current.next_functions:
            variable = getattr(after, "variable", None)
            if isinstance(variable, DTensor):
                found[id(variable)] = variable
            elif isinstance(after, BackwardCFunction) and after not in nodes:
                nodes.append(after)
    return list(found.values())


def _is_of_function(result: Tensor) -> bool:
    return isinstance(result.grad_fn, BackwardCFunction)


def _note(function: type, operands: list[DTensor]) -> None:
    name = f"{function.__module__}.{function.__qualname__}"
    key = (name, tuple(operand._spec.layout for operand in operands))
    if key in _noted or len(_noted) >= _MOST_NOTES:
        return
    _noted.add(key)
    if any(operands[0].device_mesh.get_coordinate() or ()):
        return
    logger.warning(
        "%s.apply gave plain tensors for %s: every rank has the whole of them, and of their "
        "gradients. It is right, but slow; local_map calls it on local tensors.",
        name,
        ", ".join(map(repr, operands)),
    )
