"""`capture`: record a function once for each kind of call, and replay it from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, update_wrapper
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from vescale_comm import trace as traced

from vescale_dtensor._capture.call_key import KeyedCall, check_arguments, keyed_call
from vescale_dtensor._capture.global_state import GlobalState
from vescale_dtensor._capture.module_guards import ModuleGuard, modules_called, with_submodules
from vescale_dtensor._capture.name_guards import NameGuard, contents
from vescale_dtensor._capture.outputs import plan_outputs, tensors_in
from vescale_dtensor._capture.preexisting import PreexistingTensors, leaked_tensor
from vescale_dtensor._capture.program import Parts, Program, Transform
from vescale_dtensor._capture.recorder import Recorder
from vescale_dtensor._capture.replay_check import compared
from vescale_dtensor._dispatch.plain_operands import uncompared
from vescale_dtensor._dispatch.registry import on_change
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import pause
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._torch.compat import dispatch_modes

is_compiling = torch.compiler.is_compiling

_MOST_PROGRAMS = 32
_recording: ContextVar[bool] = ContextVar("vescale_dtensor_recording", default=False)


# Every captured function: what was recorded by rules that have changed since is recorded anew.
_alive: WeakSet[Captured] = WeakSet()


@on_change
def _forget_programs() -> None:
    for captured in tuple(_alive):
        captured.programs = []


class Captured:
    """A function that is recorded once for each kind of call, and replayed from then on.

    Make one with `capture`.

    Attributes:
        function: the function or module itself.
        programs: what was recorded, the last used first.
    """

    def __init__(
        self, function: Callable[..., Any], *, check: bool, transform: Transform | None
    ) -> None:
        self.function = function
        self.programs: list[Program] = []
        self._check = check
        self._transform = transform
        self._recorded = False
        self._left = False
        self._lock = RLock()
        _alive.add(self)
        if not isinstance(function, nn.Module):
            update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the program for this call; record it first if there is none."""
        if observers or dispatch_modes() or is_compiling() or _recording.get():
            return self.function(*args, **kwargs)  # somebody wants to see every op
        call = keyed_call(args, kwargs)
        for program in self.programs:
            locals_ = program.stands_for(call)
            if locals_ is not None:
                break
        else:
            with self._lock:
                return self._record(call)
        if program is not self.programs[0]:
            self._use_first(program)
        if self._check:
            return compared(self.function, program, call)
        return program.replay(call.flat, locals_)

    def _use_first(self, program: Program) -> None:
        with self._lock:
            self.programs = [program, *(p for p in self.programs if p is not program)]

    def _record(self, call: KeyedCall) -> Any:
        check_arguments(call.flat)
        before = PreexistingTensors()
        # Ranks may differ in when they record again, and comparing plain operands is collective.
        quiet = uncompared() if self._recorded else nullcontext()
        self._recorded = True
        args, kwargs = call.arguments()
        with traced() as collectives, modules_called() as called, quiet, _in_recording():
            recorder = Recorder(before, GlobalState(*call.key[-1]), collectives)
            for index, value in enumerate(call.flat):
                if isinstance(value, Tensor):
                    recorder.trace.add_argument(value, index)
            with recorder.trace.snapshot, recorder:
                outputs = self.function(*args, **kwargs)
        modes = recorder.finish()
        made, results = plan_outputs(outputs, call.flat, recorder.trace)
        recorder.trace.graph.output(tuple(results))
        modules = with_submodules([*self._modules(), *called])
        for value in tensors_in(outputs):
            if isinstance(value, DTensor) and all(value is not given for given in call.flat):
                value._lineage = 0  # as of a replay: ranks may differ in when they record again
        if self._outlived(recorder, outputs):
            return outputs
        parts = Parts(
            call.key,
            recorder.trace,
            made,
            ModuleGuard(modules),
            recorder.gradients,
            modes,
            self._names(recorder, modules),
        )
        program = Program(parts, self._transform)
        self.programs = [program, *self.programs][:_MOST_PROGRAMS]
        return outputs

    def _outlived(self, recorder: Recorder, outputs: Any) -> bool:
        """Whether the function keeps tensors that a replay would not renew.

        What is made once (the state of an optimizer, a cache) is there before the next recording.

        Raises:
            CaptureError: it kept some in two recordings, one after the other.
        """
        found = leaked_tensor(
            recorder.trace.preexisting, recorder.trace.has_node, _parts_of(outputs)
        )
        if found is None:
            self._left = False
            return False
        if self._left:
            raise CaptureError(
                f"capture: {_described(found)} is kept outside by the function, in call after "
                "call, where a replay would leave the old one. Return it instead"
            )
        self._left = True
        return True

    def _modules(self) -> Iterator[nn.Module]:
        """Modules that the function refers to."""
        function = self.function
        while isinstance(function, partial):
            function = function.func
        owner = getattr(function, "__self__", None)
        cells = getattr(function, "__closure__", None) or ()
        held = [function, owner, *(contents(cell) for cell in cells)]
        held += getattr(function, "__defaults__", None) or ()
        yield from (value for value in held if isinstance(value, nn.Module))

    def _names(self, recorder: Recorder, modules: list[nn.Module]) -> NameGuard:
        sources = recorder.trace.sources.values()
        matter = {id(s.holder) for s in sources if s.holder is not None}
        matter.update(map(id, modules))
        return NameGuard(self.function, modules, lambda value: id(value) in matter)


@contextmanager
def _in_recording() -> Iterator[None]:
    token = _recording.set(True)
    pause.depth += 1
    try:
        yield
    finally:
        pause.depth -= 1
        _recording.reset(token)


def _parts_of(outputs: Any) -> Iterator[Tensor]:
    """The tensors among the outputs, and what their wrappers hold."""
    for value in tensors_in(outputs):
        yield from _with_parts(value)


def _with_parts(value: Tensor) -> Iterator[Tensor]:
    yield value
    if isinstance(value, DTensor):
        yield from value._use_aliases.by_mask.values() if value._use_aliases is not None else ()
        yield from (
            _with_parts(value._cached_redistribution.result)
            if value._cached_redistribution is not None
            else ()
        )
        if value._view_copy_of is not None:
            yield value._view_copy_of


def _described(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return repr(tensor)
    return f"a tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def capture(
    function: Callable[..., Any],
    *,
    check: bool = False,
    transform: Transform | None = None,
) -> Captured:
    """Record a function, or module, on DTensors once, and replay it without DTensors.

    The first call of each kind runs as ever, and is recorded as a `torch.fx` graph of what it did
    on local tensors: torch functions, collectives, autograd nodes. Later calls run the graph: no
    wrappers, no dispatch, no modules. Autograd works through it; random ops draw the numbers that
    eager would; what is written in place is written; parameters are read anew at each call.

    A call is of the same kind if these are the same: form, types and (`==`) values of Python
    arguments; layout, shape, strides, dtype, device, `requires_grad` and aliasing of tensors; grad,
    inference and autocast mode, default dtype and device, the policy of random numbers; train flag,
    hooks, parameters, buffers and submodules of every module; layout and `requires_grad` of what
    the function holds; numbers, strings and None that code reads by name. Any other Python state is
    not seen: what the function did with it when it was recorded, it does at every replay.

    Args:
        function: a function, or an `nn.Module` (its hooks are recorded with it).
        check: run the function beside each replay and compare: slow, for finding state that guards
            do not see.
        transform: called with the `torch.fx.GraphModule` of each new program; what it returns runs
            in its place (`torch.compile`, say).

    Returns:
        A callable of the same arguments and results; see `Captured`.

    Raises:
        CaptureError: when recording, if values of tensors reach Python or decide shapes, with the
            line of code; with `check`, if a replay differs.

    Under `explain()` and `strict()`, which want to see every op, the function itself runs.
    """
    return Captured(function, check=check, transform=transform)
