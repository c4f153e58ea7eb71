"""Methods of torch that read values into Python, and that a program calls again as they are.

An optimizer that counts its steps in Python, a `GradScaler` that decides whether to step, an
average that starts with a copy: their results follow from values, so no list of local calls stands
for them. All that they change is theirs, so calling them again at each replay is right. It costs
what it costs in eager mode, which is why optimizers that read nothing are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from inspect import unwrap
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from vescale_dtensor._capture.code_files import is_library_class
from vescale_dtensor._capture.code_names import code_names
from vescale_dtensor._dispatch.plain_operands import uncompared
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import pause

Scaler: Any = torch.amp.GradScaler
_NAMES = "Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam"
# They compute with the number of the step in Python, in double precision.
_COUNTING = tuple(cls for n in _NAMES.split() if (cls := getattr(torch.optim, n, None)))
_READING = frozenset({"item", "tolist", "_get_value"})


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


def live_call(frame: FrameType, met: Callable[[Any], bool]) -> LiveCall | None:
    """The call that begins with this frame, if programs make it again.

    Args:
        frame: of a function that has not done anything yet.
        met: whether an object is from outside; one that the function makes is another in each call.
    """
    function = _methods()[id(frame.f_code)]
    found = _optimizer_step(frame) if function is None else _method(frame, function)
    return found if found is not None and all(map(met, (found.owner, *found.more))) else None


def may_be_live(code: CodeType) -> bool:
    """Whether code is that of a method which programs may make again."""
    return id(code) in _methods()


def is_of_scaler(code: CodeType) -> bool:
    """Whether code is a method of a `GradScaler`, whose calls all have to be live, or none."""
    return _methods().get(id(code)) in (Scaler.unscale_, Scaler.step, Scaler.update)


def _optimizer_step(frame: FrameType) -> LiveCall | None:
    """The call of an optimizer's `step`, without a closure."""
    given = [*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values()]
    owner = given[0] if given else None
    if not isinstance(owner, Optimizer) or any(one is not None for one in given[1:]):
        return None
    step: Any = type(owner).step
    # Not the `step` of a base class, which is called inside of this one.
    if getattr(step, "__code__", None) is not frame.f_code or not reads_values(owner):
        return None
    return LiveCall(step, owner)


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
    optimizer = space["optimizer"]
    if space.get("args") or space.get("kwargs") or not reads_values(optimizer):
        return None
    return LiveCall(function, space["self"], (optimizer,))


def reads_values(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer reads values of tensors into Python."""
    groups = optimizer.param_groups
    if any(group.get("differentiable") for group in groups):
        return False  # its gradients flow through the step
    if isinstance(optimizer, _COUNTING):
        return not all(group.get("fused") or group.get("capturable") for group in groups)
    cls: Any = type(optimizer)
    return not is_library_class(cls) and _mentions_values(cls)


@lru_cache(maxsize=256)
def _mentions_values(cls: type) -> bool:
    """Whether the code of a class, and what it calls in its own file, names what reads values."""
    queue: list[Any] = [v for base in cls.__mro__ if not is_library_class(base)
                        for v in vars(base).values()]  # fmt: skip
    seen: set[CodeType] = set()
    while queue:
        function = queue.pop()
        # Decorated functions, `step` itself among them, stand for what they call.
        function = unwrap(function) if callable(function) else None
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = code_names(function.__code__)
        if _READING & (names.globals | names.attributes):
            return True
        queue += [function.__globals__.get(name) for name in names.globals]
    return False


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
