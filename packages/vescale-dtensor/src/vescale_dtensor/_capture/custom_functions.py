"""Custom autograd.Functions on plain tensors: a step that replays make again, by `Function.apply`.

`apply` is written in C and no torch function, so no mode sees it. The profiler does, and the calls
on tensors in its forward are recorded like others: so all that a recording refuses is refused, and
all that Python code reads is guarded. Then one step, the call itself, takes the place of them. At
a replay it runs the user's forward anew, and a later backward the user's backward.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from vescale_dtensor._capture.code_files import is_library_class
from vescale_dtensor._capture.global_state import GlobalState, global_state
from vescale_dtensor._capture.graph import TracedGraph
from vescale_dtensor._capture.nesting import running_inside
from vescale_dtensor._capture.unsupported import refused, user_line
from vescale_dtensor._dispatch.plain_operands import uncompared
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import no_torch_function

Function: Any = torch.autograd.Function
_STEPS = frozenset({"call_function", "call_method"})
# The file of torch's own functions that `apply` calls from C.
_OF_FUNCTION = torch.autograd.function.__file__


class Steps(Protocol):
    """What of a recorder is needed here; see `Recorder`."""

    trace: TracedGraph
    failure: CaptureError | None

    def follow(self, now: GlobalState, sensitive: bool) -> None: ...
    def step(
        self, func: Any, first: Any, arguments: list[Any], call: tuple[str, str]
    ) -> fx.Node: ...
    def function_ended(self, node: fx.Node, outputs: Any, modes: GlobalState) -> None: ...


def apply_again(function: Any, *arguments: Any) -> Any:
    """Apply a custom Function; a step of programs."""
    # As a recording does, which another rank may be making of this call.
    with uncompared(), running_inside():
        return function.apply(*arguments)


def is_apply(called: Any) -> bool:
    """Whether a function in C is the `apply` of a Function of the user's.

    Not of torch's own, for backward hooks of modules, say: their history is refused.
    """
    owner = getattr(called, "__self__", None)
    if called.__name__ != "apply" or not isinstance(owner, type):
        return False
    return issubclass(owner, Function) and not is_library_class(owner)


class CustomCall:
    """One call of `apply` that is in progress.

    Attributes:
        cls: the custom Function.
        line: of the user's code.
        modes: those in which it was called.
        before: the last node of the graph before it.
        arguments: what it was given; None until its forward begins.
    """

    def __init__(self, frame: FrameType, called: Any, recorder: Steps) -> None:
        self.cls, self.line = called.__self__, user_line()
        self._frame, self._called = frame, called
        with no_torch_function():
            self.modes = GlobalState(*global_state())
        # Before the forward, whose steps will be taken out again.
        recorder.follow(self.modes, True)
        self.before: fx.Node | None = next(iter(reversed(recorder.trace.graph.nodes)), None)
        self.arguments: list[Any] | None = None

    def is_of(self, frame: FrameType, called: Any) -> bool:
        """Whether this is the call that ends, and not another one inside."""
        return frame is self._frame and called == self._called

    def is_forward(self, frame: FrameType) -> bool:
        """Whether this is the forward, and not what torch calls before it to bind arguments."""
        return frame.f_back is self._frame and frame.f_code.co_filename != _OF_FUNCTION

    @property
    def is_plain(self) -> bool:
        """Whether it was given no DTensors."""
        given = self.arguments
        return given is not None and not any(isinstance(value, DTensor) for value in given)

    def begins(self, frame: FrameType) -> None:
        """Take the arguments from the forward."""
        code, given = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount]
        arguments = [given[name] for name in names]
        if code.co_flags & 0x04:  # *args
            arguments += given[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]]
        if self.cls.setup_context is Function.setup_context:
            # Without arguments that were left to their defaults: gradients are counted by them.
            arguments = arguments[1 : 1 + len(arguments[0].needs_input_grad)]
        self.arguments = arguments


def record(call: CustomCall, outputs: Any, recorder: Steps) -> None:
    """Put one step, the call, in the place of those that its forward made.

    Args:
        call: it has ended.
        outputs: what its forward returned, which has a history by now.
        recorder: of the recording.

    Raises:
        CaptureError: replays could not make the call again.
    """
    trace, arguments = recorder.trace, call.arguments
    if not call.is_plain:
        return  # a history that `TracedGraph.node_of` refuses
    assert arguments is not None
    flat = outputs if isinstance(outputs, tuple) else (outputs,)
    made = [value for value in flat if isinstance(value, Tensor)]
    why = _why_not(call, made, len(made) == len(flat), recorder)
    if why is not None:
        raise refused(f"a custom autograd.Function, {call.cls.__name__}, {why}")
    erased = _erase_after(call.before, trace)
    node = recorder.step(apply_again, call.cls, arguments, (call.cls.__qualname__, call.line))
    node.meta["effect"] = True  # it is the user's code
    node.meta["records"] = tuple(one for n in erased for one in n.meta.get("records", ()))
    node.meta["writes"] = [one for n in erased for one in n.meta.get("writes", ())]
    recorder.function_ended(node, outputs, call.modes)


def _why_not(call: CustomCall, made: list[Tensor], tensors: bool, recorder: Steps) -> str | None:
    """Why replays could not make a call again, in words."""
    assert call.arguments is not None
    if not recorder.trace.met(call.cls):
        return "is defined inside. Define it outside of the captured function"
    if not tensors or not made:
        return "returns something else than tensors. Let it return tensors alone"
    if any(one is two for one in made for two in call.arguments):
        return (
            "returns one of its arguments (mark_dirty, or as it is). Let it return new tensors: "
            "x.clone(), say"
        )
    return None


def _erase_after(before: fx.Node | None, trace: TracedGraph) -> list[fx.Node]:
    """Take out the steps after a node; returns them."""
    erased: list[fx.Node] = []
    for node in reversed(trace.graph.nodes):
        if node is before:
            break
        if node.op in _STEPS:  # arguments and constants may be those of later steps, too
            erased.append(node)
    for node in erased:
        trace.graph.erase_node(node)
    trace.forget(set(erased))
    return erased
