"""Methods of torch that a program calls again as they are: steps of optimizers and scalers.

They count in Python, read values to decide what to do, and take numbers that change (a learning
rate): no list of local calls stands for them. All that they change is theirs, so calling them again
at each replay is right, at what it costs in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from vescale_dtensor._capture.global_state import GlobalState, global_state
from vescale_dtensor._capture.unsupported import user_line
from vescale_dtensor._dispatch.plain_operands import uncompared
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import pause

Scaler: Any = torch.amp.GradScaler


@dataclass(frozen=True)
class LiveCall:
    """A call that programs make again.

    Attributes:
        function: of a class.
        owner: the object whose method it is.
        more: further arguments, objects from outside.
    """

    function: Callable[..., Any]
    owner: Any
    more: tuple[Any, ...] = ()


def call_again(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a method as it is; a step of programs."""
    # As a recording does, which another rank may be making of this call.
    pause.depth += 1
    try:
        with uncompared():
            function(*arguments)
    finally:
        pause.depth -= 1


class LiveCalls:
    """The calls of a recording that programs make again.

    No mode sees a method begin. A call on tensors inside shows it: by the frames that run.

    Args:
        met: whether an object is from outside; one that the function makes is another in each call.

    Attributes:
        ended: those that have ended, with the lines of code that made them and the modes in which
            they began.
    """

    def __init__(self, met: Callable[[Any], bool]) -> None:
        self._met = met
        self.ended: list[tuple[LiveCall, str, GlobalState]] = []
        # Held, so that no other frame gets the id of one. Whether it is of a live call.
        self._judged: dict[FrameType, bool] = {}
        self._now: tuple[FrameType, tuple[LiveCall, str, GlobalState]] | None = None

    def are_running(self, frames: Sequence[FrameType]) -> bool:
        """Whether one of these frames, the innermost first, is of a live call."""
        methods = _methods()
        for frame in reversed(frames):
            if id(frame.f_code) in methods and self._is_live(frame, methods):
                return True
        self.end()
        return False

    def _is_live(self, frame: FrameType, methods: dict[int, Any]) -> bool:
        if frame not in self._judged:
            function = methods[id(frame.f_code)]
            call = _optimizer_step(frame) if function is None else _method(frame, function)
            live = call is not None and all(map(self._met, (call.owner, *call.more)))
            self._judged[frame] = live
            if live and call is not None:
                self.end()
                self._now = frame, (call, user_line(), GlobalState(*global_state()))
        return self._judged[frame]

    def end(self) -> None:
        """No live call runs."""
        if self._now is not None:
            self.ended.append(self._now[1])
        self._now = None

    def forget(self) -> None:
        """Let go of the frames, which hold all that the function made: it has ended."""
        self.end()
        self._judged.clear()


def _optimizer_step(frame: FrameType) -> LiveCall | None:
    """The call of an optimizer's `step`, without a closure."""
    given = [*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values()]
    owner = given[0] if given else None
    if not isinstance(owner, Optimizer) or any(one is not None for one in given[1:]):
        return None
    step: Any = type(owner).step
    # Not the `step` of a base class, which is called inside of this one.
    if getattr(step, "__code__", None) is not frame.f_code:
        return None
    # Gradients flow through such a step: it is one of the function's own.
    differentiable = any(group.get("differentiable") for group in owner.param_groups)
    return None if differentiable else LiveCall(step, owner)


@lru_cache(maxsize=1)
def _methods() -> dict[int, Any]:
    """The methods, by the id of their code; None for the `step` of any optimizer."""
    found = (Scaler.unscale_, Scaler.step, Scaler.update, AveragedModel.update_parameters)
    # What torch makes of the `step` of every class: it calls the hooks.
    hooked = Optimizer.profile_hook_step.__code__.co_consts
    steps = {id(code): None for code in hooked if isinstance(code, CodeType)}
    return {id(function.__code__): function for function in found} | steps


def _method(frame: FrameType, function: Any) -> LiveCall | None:
    """The call of a scaler's or an average's method."""
    space = frame.f_locals
    if function is AveragedModel.update_parameters:
        return LiveCall(function, space["self"], (space["model"],))
    if function is Scaler.update:
        return None if space["new_scale"] is not None else LiveCall(function, space["self"])
    if space.get("args") or space.get("kwargs"):
        return None
    return LiveCall(function, space["self"], (space["optimizer"],))


class Kept:
    """The state of what live calls change: containers and tensors below their objects.

    Attributes:
        spaces: dicts and lists, with what they hold.
        tensors: local ones.
        values: copies of these.
    """

    def __init__(self, calls: Iterable[LiveCall], copy: bool = True) -> None:
        self.spaces: list[tuple[Any, Any]] = []
        self.tensors: list[Tensor] = []
        seen: set[int] = set()
        queue: list[Any] = [one for call in calls for one in (call.owner, *call.more)]
        while queue:
            value = queue.pop()
            if id(value) not in seen:
                seen.add(id(value))
                queue += self._parts(value)
        self.values = [tensor.detach().clone() for tensor in self.tensors] if copy else []

    def _parts(self, value: Any) -> Iterator[Any]:
        """Take in one object; what it leads to."""
        if isinstance(value, Tensor):
            local = value._local_tensor if isinstance(value, DTensor) else value
            self.tensors.append(local)
            if local.is_leaf and local.grad is not None:
                self.tensors.append(local.grad)
        elif isinstance(value, dict):
            self.spaces.append((value, dict(value)))
            yield from [*value.keys(), *value.values()]
        elif isinstance(value, list):
            self.spaces.append((value, list(value)))
            yield from value
        elif isinstance(value, Optimizer | nn.Module | Scaler):
            yield vars(value)

    def put_back(self) -> None:
        """Make everything what it was."""
        for space, was in self.spaces:
            space.clear()
            (space.update if isinstance(space, dict) else space.extend)(was)
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.data.copy_(value)
