"""Custom autograd.Functions: a step that replays make again, by `Function.apply`.

`apply` is written in C and no torch function, so no mode sees it. The profiler does, and the calls
on tensors in its forward are recorded like others: so all that a recording refuses is refused, and
all that Python code reads is guarded. Then one step, the call itself, takes the place of them. At
a replay it runs the user's forward anew, and a later backward the user's backward. Where a Function
is given DTensors, it is given DTensors by replays, too: see `function_wrappers`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from vescale_comm.nested import tensors_within

from vescale_dtensor._autograd.function_bridge import has_siblings, joined_local
from vescale_dtensor._capture.code_files import is_library_class
from vescale_dtensor._capture.function_wrappers import given_nodes, local_of
from vescale_dtensor._capture.global_state import GlobalState, global_state
from vescale_dtensor._capture.graph import TracedGraph
from vescale_dtensor._capture.nesting import running_inside
from vescale_dtensor._capture.unsupported import refused, user_line
from vescale_dtensor._dispatch.plain_operands import uncompared
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import no_torch_function
from vescale_dtensor._torch.overridable import implementation_of

Function: Any = torch.autograd.Function
_STEPS = frozenset({"call_function", "call_method"})
# The file of torch's own functions that `apply` calls from C.
_OF_FUNCTION = torch.autograd.function.__file__


class Steps(Protocol):
    """What of a recorder is needed here; see `Recorder`."""

    trace: TracedGraph
    failure: str | None

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
        nodes: the same, with a node for each DTensor.
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
        self.nodes: list[Any] = []

    def is_of(self, frame: FrameType, called: Any) -> bool:
        """Whether this is the call that ends, and not another one inside."""
        return frame is self._frame and called == self._called

    def is_forward(self, frame: FrameType) -> bool:
        """Whether this is the forward, and not what torch calls before it to bind arguments."""
        return frame.f_back is self._frame and frame.f_code.co_filename != _OF_FUNCTION

    @property
    def is_wrapped(self) -> bool:
        """Whether it was given DTensors."""
        return any(isinstance(value, DTensor) for value in self.arguments or ())

    def begins(self, frame: FrameType, trace: TracedGraph) -> None:
        """Take the arguments from the forward.

        Raises:
            CaptureError: it is given DTensors of which a replay could not make the like.
        """
        code, given = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount]
        arguments = [given[name] for name in names]
        if code.co_flags & 0x04:  # *args
            arguments += given[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]]
        if self.cls.setup_context is Function.setup_context:
            # Without arguments that were left to their defaults: gradients are counted by them.
            arguments = arguments[1 : 1 + len(arguments[0].needs_input_grad)]
        self.arguments = self.nodes = arguments
        inside = tensors_within([v for v in arguments if not isinstance(v, Tensor)])
        if any(isinstance(value, DTensor) for value in inside):
            raise _refused(self.cls, "is given DTensors in a list. Give it each by itself")
        if self.is_wrapped:
            # Now: its forward leaves caches on them. These steps stay, when its own are taken out.
            self.nodes = given_nodes(arguments, trace)
            self.before = next(iter(reversed(trace.graph.nodes)), None)


def record(call: CustomCall, outputs: Any, recorder: Steps) -> None:
    """Put one step, the call, in the place of those that its forward made.

    Args:
        call: it has ended.
        outputs: what its forward returned, which has a history by now.
        recorder: of the recording.

    Raises:
        CaptureError: replays could not make the call again.
    """
    trace = recorder.trace
    if call.arguments is None:
        return  # its forward is no Python function: a history that `TracedGraph.node_of` refuses
    flat = outputs if isinstance(outputs, tuple) else (outputs,)
    made = [value for value in flat if isinstance(value, Tensor)]
    why = _why_not(call, made, len(made) == len(flat), recorder)
    if why is not None:
        raise _refused(call.cls, why)
    erased = _erase_after(call.before, trace)
    node = recorder.step(apply_again, call.cls, call.nodes, (call.cls.__qualname__, call.line))
    node.meta["effect"] = True  # it is the user's code
    node.meta["records"] = tuple(one for n in erased for one in n.meta.get("records", ()))
    node.meta["writes"] = [one for n in erased for one in n.meta.get("writes", ())]
    if not call.is_wrapped:
        recorder.function_ended(node, outputs, call.modes)
        return
    node.meta["wrapped"] = True
    for index, value in enumerate(made):
        assert isinstance(value, DTensor)
        part = node
        if isinstance(outputs, tuple):
            part = trace.graph.call_function(operator.getitem, (node, index))
        trace.returned[id(value)] = value, part
        # Without history: as long as no op joins it, only code without grad uses it.
        local = trace.graph.call_function(local_of, (part,))
        recorder.function_ended(local, value._local_tensor, call.modes)


def record_join(
    wrapper: DTensor, recorder: Steps, run: Callable[[Callable[..., Any], DTensor], Any]
) -> Tensor:
    """Join what a Function returned to the graph of local tensors; a step of its own.

    Args:
        wrapper: it, at its first use.
        recorder: of the recording.
        run: calls a function.

    Raises:
        CaptureError: nothing is known of the Function.
    """
    node = recorder.trace.wrapper_node(wrapper)
    if node is None or has_siblings(wrapper):
        raise refused(
            f"a DTensor {list(wrapper.shape)} got its gradient from a custom autograd.Function "
            "(a full backward hook of a module is one) that torch's overrides do not see, or whose "
            "node code asks for (grad_fn). Call it outside"
        )
    modes = GlobalState(*global_state())
    recorder.follow(modes, True)
    result: Tensor = run(joined_local, wrapper)
    step = recorder.trace.graph.call_function(implementation_of(joined_local), (node,))
    recorder.function_ended(step, result, modes)
    return result


def _refused(cls: type, why: str) -> CaptureError:
    return refused(f"a custom autograd.Function, {cls.__name__}, {why}")


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
    if call.is_wrapped and not all(isinstance(one, DTensor) for one in made):
        return "is given DTensors and returns plain tensors. Call it by local_map(F.apply, …)"
    locals_ = [one._local_tensor for one in made if isinstance(one, DTensor)]
    if len(set(map(id, locals_))) < len(locals_):
        return "returns one result twice. Let it return clones"
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
