"""Custom autograd.Functions: a step that replays make again, by `Function.apply`.

`apply` is no torch function, so no mode sees it. The calls on tensors in its forward are recorded
like others: so all that a recording refuses is refused. When it has ended, which the next call on
tensors shows, one step, the call itself, takes the place of them. At
a replay it runs the user's forward anew, and a later backward the user's backward. Where a Function
is given DTensors, it is given DTensors by replays, too: see `function_wrappers`.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from vescale_comm.nested import tensors_within

from vescale_dtensor._autograd.function_bridge import has_siblings, joined_local
from vescale_dtensor._autograd.function_forwards import running_forwards
from vescale_dtensor._autograd.function_results import HandsOn, waits_for_results
from vescale_dtensor._capture.code_files import is_library_class
from vescale_dtensor._capture.function_wrappers import given_nodes, local_of
from vescale_dtensor._capture.global_state import GlobalState, global_state
from vescale_dtensor._capture.graph import TracedGraph
from vescale_dtensor._capture.nesting import running_inside
from vescale_dtensor._capture.program_modes import ProgramModes
from vescale_dtensor._capture.unsupported import refused, user_line
from vescale_dtensor._dispatch.plain_operands import uncompared
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import apply_code, no_torch_function
from vescale_dtensor._torch.overridable import implementation_of

Function: Any = torch.autograd.Function
_STEPS = frozenset({"call_function", "call_method"})
_ITS_ARGUMENT = (
    "returns one of its arguments (mark_dirty, or as it is). Let it return new tensors: "
    "x.clone(), say"
)
_NONE: Any = object()  # as nothing that a forward returns


class Steps(Protocol):
    """What of a recorder is needed here; see `Recorder`."""

    trace: TracedGraph
    modes: ProgramModes

    def step(
        self, func: Any, first: Any, arguments: list[Any], call: tuple[str, str]
    ) -> fx.Node: ...
    def function_ended(self, node: fx.Node, outputs: Any, modes: GlobalState) -> None: ...


def apply_again(function: Any, *arguments: Any) -> Any:
    """Apply a custom Function; a step of programs."""
    # As a recording does, which another rank may be making of this call.
    with uncompared(), running_inside():
        return function.apply(*arguments)


class CustomCalls(HandsOn):
    """The calls of `apply` in a recording.

    What forward returns only a profile function sees: there is one from the first call on tensors
    inside to the end of the forward.

    Args:
        recorder: of the recording.
    """

    def __init__(self, recorder: Steps) -> None:
        self._recorder = recorder
        self._call: CustomCall | None = None
        # The profile function that this one stands in the place of, if any.
        self._waiting: Any = None

    def see(self, frames: list[FrameType]) -> bool:
        """Note a call that begins, or has ended; whether torch finishes one.

        Args:
            frames: that run, the innermost first.

        Raises:
            CaptureError: the call cannot be recorded.
        """
        if self._call is not None and self._call.is_over(frames):
            self.finish()
        if self._call is None:
            forward = _outermost_forward(frames)
            if forward is not None:
                before = sys.getprofile()
                if before is not None and not waits_for_results(before):
                    raise _refused(_function_of(forward), "is called while a profiler is on")
                self._call = CustomCall(forward, self._recorder)
                self._waiting = before
                sys.setprofile(self._event)
        return self._call is not None and self._call.outputs is not _NONE

    def finish(self) -> None:
        """Make a step of a call that has ended."""
        call, self._call = self._call, None
        if call is not None and call.outputs is not _NONE:
            record(call, call.outputs, self._recorder)

    def stop(self) -> None:
        """Let go of the frames of the function: it has ended, or nothing is recorded any more."""
        if self._call is not None:
            self._call.forget()
        if sys.getprofile() == self._event:
            sys.setprofile(self._waiting)

    def wait(self, make: Callable[[], Any], frames: list[FrameType], shard: bool) -> None:
        """See `HandsOn`: results of custom Functions are waited for while this watches."""
        waiting = self._waiting or make()
        # First, without events: one that waits for nothing leaves at its first, and this method
        # returns.
        waiting.note(frames, shard)
        self._waiting = waiting

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by Python at each call and return in this thread."""
        if self._waiting is not None:
            self._waiting(frame, event, argument)
            if sys.getprofile() is None:  # it has what it waited for
                self._waiting = None
                sys.setprofile(self._event)
        call = self._call
        if call is None:
            sys.setprofile(self._waiting)
        elif event == "return" and frame is call.frame:
            with no_torch_function():  # the recorder is a mode, which need not see itself
                call.ends(argument)
            sys.setprofile(self._waiting)


def _outermost_forward(frames: list[FrameType]) -> FrameType | None:
    """The forward of a custom Function of the user's that runs, if one does."""
    if apply_code is None:
        found = running_forwards()
    else:
        # Not of torch's own, for backward hooks of modules, say: their history is refused.
        pairs = [
            (i, o) for i, o in zip([None, *frames], frames, strict=False) if o.f_code is apply_code
        ]
        if any(_is_view_of_argument(*pair) for pair in pairs[-1:]):
            raise _refused(pairs[-1][1].f_locals["cls"], _ITS_ARGUMENT)
        found = [inner for inner, _ in pairs if inner is not None]
    found = [one for one in found if not is_library_class(_function_of(one))]
    return found[-1] if found else None


def _is_view_of_argument(inner: FrameType | None, outer: FrameType) -> bool:
    """Whether C++ makes a view of an argument that comes out as it is, and forward did nothing."""
    ours = inner is None or str(inner.f_globals.get("__name__")).startswith("vescale_")
    return ours and not is_library_class(outer.f_locals["cls"])


def _function_of(forward: FrameType) -> Any:
    """The custom Function whose forward runs."""
    caller = forward.f_back
    if caller is not None and caller.f_code is apply_code:
        return caller.f_locals["cls"]
    names = forward.f_code.co_varnames
    context = forward.f_locals.get(names[0]) if names else None
    return getattr(context, "_forward_cls", Function)


class CustomCall:
    """One call of `apply` that is in progress.

    Attributes:
        cls: the custom Function.
        line: of the user's code.
        frame: of its forward.
        start: the last node of the graph when it began.
        before: the last node before its own steps.
        arguments: what it was given.
        nodes: the same, with a node for each DTensor.
        outputs: what its forward returned.
        modes: those in which it was called.
    """

    def __init__(self, forward: FrameType, recorder: Steps) -> None:
        self.cls, self.line = _function_of(forward), user_line()
        self.frame: FrameType | None = forward
        self._caller = forward.f_back
        self._at = None if self._caller is None else self._caller.f_lasti
        self.lagging = recorder.modes.now
        self.outputs: Any = _NONE
        self.modes: GlobalState | None = None
        trace = recorder.trace
        self.start: fx.Node | None = next(iter(reversed(trace.graph.nodes)), None)
        self.arguments = self.nodes = self._given(forward)
        inside = tensors_within([v for v in self.arguments if not isinstance(v, Tensor)])
        if any(isinstance(value, DTensor) for value in inside):
            raise _refused(self.cls, "is given DTensors in a list. Give it each by itself")
        if self.is_wrapped:
            # Now: its forward leaves caches on them. These steps stay, when its own are taken out.
            self.nodes = given_nodes(self.arguments, trace)
        self.before: fx.Node | None = next(iter(reversed(trace.graph.nodes)), None)

    def _given(self, forward: FrameType) -> list[Any]:
        """The arguments of the call."""
        caller = forward.f_back
        if caller is not None and caller.f_code is apply_code:
            return list(caller.f_locals["args"])
        code, given = forward.f_code, forward.f_locals
        arguments = [given[name] for name in code.co_varnames[: code.co_argcount]]
        if code.co_flags & 0x04:  # *args
            arguments += given[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]]
        if self.cls.setup_context is Function.setup_context:
            # Without arguments that were left to their defaults: gradients are counted by them.
            arguments = arguments[1 : 1 + len(arguments[0].needs_input_grad)]
        return arguments

    def is_over(self, frames: list[FrameType]) -> bool:
        """Whether `apply` has returned: what runs in its C++ leaves its caller where it was."""
        caller = self._caller
        return caller is None or caller not in frames or caller.f_lasti != self._at

    @property
    def is_wrapped(self) -> bool:
        """Whether it was given DTensors."""
        return any(isinstance(value, DTensor) for value in self.arguments)

    def forget(self) -> None:
        """Let go of the frames."""
        self.frame = self._caller = None

    def ends(self, outputs: Any) -> None:
        """Note what the forward returns, and the modes, which are the caller's but for grad."""
        self.outputs, self.modes = outputs, GlobalState(*global_state())


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
    flat = outputs if isinstance(outputs, tuple) else (outputs,)
    made = [value for value in flat if isinstance(value, Tensor)]
    why = _why_not(call, made, len(made) == len(flat), recorder)
    if why is not None:
        raise _refused(call.cls, why)
    erased = _erase_after(call.before, trace)
    # C++ runs forward without grad, and says by a history that the caller had it on.
    assert call.modes is not None
    wants = any(one.requires_grad for one in tensors_within(call.arguments))
    modes = call.modes._replace(grad=any(one.requires_grad for one in made))
    recorder.modes.now = call.lagging
    with trace.graph.inserting_after(call.start) if call.start else nullcontext():
        recorder.modes.follow(modes, wants)
    modes = modes if wants else modes._replace(grad=recorder.modes.now[0])
    node = recorder.step(apply_again, call.cls, call.nodes, (call.cls.__qualname__, call.line))
    node.meta["effect"] = True  # it is the user's code
    node.meta["records"] = tuple(one for n in erased for one in n.meta.get("records", ()))
    node.meta["writes"] = [one for n in erased for one in n.meta.get("writes", ())]
    if not call.is_wrapped:
        recorder.function_ended(node, outputs, modes)
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
        recorder.function_ended(local, value._local_tensor, modes)


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
    recorder.modes.follow(modes, True)
    result: Tensor = run(joined_local, wrapper)
    step = recorder.trace.graph.call_function(implementation_of(joined_local), (node,))
    recorder.function_ended(step, result, modes)
    return result


def _refused(cls: type, why: str) -> CaptureError:
    return refused(f"a custom autograd.Function, {cls.__name__}, {why}")


def _why_not(call: CustomCall, made: list[Tensor], tensors: bool, recorder: Steps) -> str | None:
    """Why replays could not make a call again, in words."""
    if not recorder.trace.met(call.cls):
        return "is defined inside. Define it outside of the captured function"
    if not tensors or not made:
        return "returns something else than tensors. Let it return tensors alone"
    if any(one is two for one in made for two in call.arguments):
        return _ITS_ARGUMENT
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
