"""Plain results of custom autograd.Functions, found where `Function.apply` is C.

A profile function sees no frame of such an `apply`, nor what it returns. What it sees is the
forward, whose results get their autograd node from C++ after it has returned. So they are noted
there, and handed on at the first event at which the caller of `apply` has gone on. Operators of
Python (`result * 2`) are no event where all operands are plain; to make them one, the results are
of the class `Awaited` until then.

Left out is a plain tensor that went in and comes out as it is: C++ returns another object for it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._torch.compat import forward_grad_enabled, without_overrides

Join = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Called with the results that a Function gave a node, or may have, and with its arguments."""


def running_forwards() -> list[FrameType]:
    """The forwards of custom Functions that run in this thread, the innermost first."""
    if forward_grad_enabled():
        return []
    codes, found = _codes_of_forwards(), []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes and frame.f_back is not None:
            found.append(frame)
        frame = frame.f_back
    return found


def _codes_of_forwards() -> set[CodeType]:
    """The code of each Function's forward, or of the decorator around it."""
    # A decorator has the same code wherever it stands. A match that is none gives no
    # tensors with a new node, so nothing comes of it.
    functions = [torch.autograd.Function]
    for function in functions:
        functions += function.__subclasses__()
    codes = (getattr(f.forward, "__code__", None) for f in functions if not _is_ours(f))
    return {code for code in codes if code is not None}


def _is_ours(function: type) -> bool:
    # Ours get local tensors, and return such.
    return function.__module__.startswith("vescale_dtensor.")


class Forwards:
    """A profile function that waits until forwards return, and until their callers go on."""

    def __init__(self, join: Join) -> None:
        self._join = join
        # For each forward that runs: its tensors, and whether a rank's part went into it.
        self._running: dict[FrameType, tuple[list[Tensor], bool]] = {}
        self._made: list[_Results] = []

    def note(self, frames: Iterable[FrameType], shard: bool) -> None:
        """Wait for these forwards, which use values of a DTensor, or of a rank's part of one."""
        for frame in frames:
            arguments, of_shards = self._running.get(frame) or (_arguments(frame), False)
            self._running[frame] = arguments, of_shards or shard

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Note what a forward returns; hand on what `apply` has returned since."""
        for results in [made for made in self._made if made.are_out(frame)]:
            self._made.remove(results)
            results.hand_on()
        if event == "return" and frame in self._running:
            arguments, of_shards = self._running.pop(frame)
            if value is not None and not of_shards:  # a forward that raises has None
                self._made.append(_Results(value, arguments, frame.f_back, self._join))
        if not self._running and not self._made:
            sys.setprofile(None)


def _arguments(frame: FrameType) -> list[Tensor]:
    """The tensors among a call's arguments, as far as the function has not bound other values."""
    names, rest, named, values = inspect.getargvalues(frame)
    wanted = [*names, *(name for name in (rest, named) if name is not None)]
    return tensors_within([values.get(name) for name in wanted])


class _Results:
    """What a forward returned, until C++ has given it a node."""

    def __init__(
        self, returned: Any, arguments: list[Tensor], caller: FrameType | None, join: Join
    ) -> None:
        self._arguments, self._caller, self._join = arguments, caller, join
        self._at = None if caller is None else caller.f_lasti
        values = returned if isinstance(returned, tuple) else (returned,)
        tensors: list[Any] = [value for value in values if isinstance(value, Tensor)]
        # Weak, since `apply` may raise instead of returning them; each with the node that it had.
        self._known = [(weakref.ref(t), _plain_node(t)) for t in tensors]
        for tensor in tensors:
            if type(tensor) is Tensor and (tensor.is_floating_point() or tensor.is_complex()):
                awaited: Any = tensor
                awaited._vescale_results = self
                _give_class(tensor, Awaited)

    def are_out(self, frame: FrameType | None = None) -> bool:
        """Whether `apply` has returned. What runs in its C++ leaves its caller where it was."""
        caller = self._caller
        return frame is caller or caller is None or caller.f_lasti != self._at

    def have_node(self) -> bool:
        """Whether C++ has come as far as to give one of them its node."""
        known = ((reference(), before) for reference, before in self._known)
        return any(t is not None and _plain_node(t) is not before for t, before in known)

    def hand_on(self) -> None:
        """Make them plain tensors, and join those that have a node now."""
        found = []
        for reference, before in self._known:
            tensor = reference()
            if tensor is None:
                continue
            if type(tensor) is Awaited:
                _give_class(tensor, Tensor)
                del tensor._vescale_results
            if before is None or _plain_node(tensor) is not before:
                found.append(tensor)
        self._known = []
        # Their first use may be without grad. Their node says that `apply` was not.
        with torch.inference_mode(False), torch.enable_grad():
            self._join(found, self._arguments)


def _plain_node(tensor: Tensor) -> Any:
    if type(tensor) not in (Tensor, Awaited, torch.nn.Parameter):
        return None  # that of a DTensor is not asked for: who asks shows it to users
    with without_overrides():
        return tensor.grad_fn


def _give_class(tensor: Any, kind: type) -> None:
    tensor.__class__ = kind


class Awaited(Tensor):
    """A plain result between the forward that made it and the first event after its `apply`."""

    _vescale_results: _Results

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Hand on what has a node, and run the function on plain tensors."""
        kwargs = kwargs or {}
        awaited: Any = [t for t in tensors_within([args, kwargs]) if type(t) is Awaited]
        for results in {tensor._vescale_results for tensor in awaited}:
            # `apply` itself uses one with a node: it clears the hooks of what the forward wrote to.
            if results.are_out() or (results.have_node() and func.__name__ != "__set__"):
                results.hand_on()
        # `setup_context` uses them before they have one.
        early = [tensor for tensor in awaited if type(tensor) is Awaited]
        for tensor in early:
            _give_class(tensor, Tensor)
        try:
            if awaited:
                return func(*args, **kwargs)
            with without_overrides():  # in a container that is not looked into
                return func(*args, **kwargs)
        finally:
            for tensor in early:
                _give_class(tensor, Awaited)
