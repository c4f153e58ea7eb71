"""`capture`: record a function once for each kind of call, and replay it from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import update_wrapper
from threading import RLock
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from vescale_comm import trace as traced

from vescale_dtensor._capture.call_key import KeyedCall, check_arguments, outside_arguments
from vescale_dtensor._capture.global_state import GlobalState
from vescale_dtensor._capture.misses import MOST_PROGRAMS, Misses
from vescale_dtensor._capture.module_guards import ModuleGuard
from vescale_dtensor._capture.noting import Watch, can_watch
from vescale_dtensor._capture.outputs import plan_outputs, tensors_in
from vescale_dtensor._capture.own_state import changed_error, check_visible
from vescale_dtensor._capture.places import Origin
from vescale_dtensor._capture.program import Parts, Program, Transform
from vescale_dtensor._capture.reads import Reads
from vescale_dtensor._capture.recorder import Recorder
from vescale_dtensor._capture.replay_check import compared
from vescale_dtensor._capture.state_guard import StateGuard, own_changes
from vescale_dtensor._dispatch.plain_operands import uncompared
from vescale_dtensor._dispatch.registry import on_change
from vescale_dtensor._layout.executed import unrecorded
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.lineage import pause
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._torch.compat import dispatch_modes

Check = bool | Literal["sampled"]
is_compiling = torch.compiler.is_compiling

# When "sampled" compares: early calls, since mistakes of the guards show at once, then rarely.
_EARLY, _RARELY = 3, 1024
# A context variable, as ranks of a simulation are threads of one process.
_recording: ContextVar[bool] = ContextVar("vescale_dtensor_recording", default=False)


# Every captured function: what was recorded by rules that have changed since is recorded anew.
# Weak: a captured function lives as long as its user wants it.
_alive: WeakSet[Captured] = WeakSet()


@on_change
def _forget_programs() -> None:
    """Drop all programs: a rule has changed that they may have been recorded by."""
    # A copy: a garbage collection may take some out of the set meanwhile.
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
        self,
        function: Callable[..., Any],
        *,
        check: Check,
        transform: Transform | None,
        unguarded: frozenset[str],
    ) -> None:
        self.function = function
        self.programs: list[Program] = []
        self._check = check
        self._transform = transform
        self._misses = Misses(getattr(function, "__qualname__", type(function).__name__))
        self._calls = 0
        self._unguarded = unguarded
        # The key of the last call in whose recording the function changed Python state.
        self._changing: tuple[Any, ...] | None = None
        # Re-entrant: a function that runs unrecorded may call its captured self.
        self._lock = RLock()
        _alive.add(self)
        if not isinstance(function, nn.Module):
            update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the program for this call; record it first if there is none."""
        if observers or dispatch_modes() or is_compiling() or _recording.get():
            return self.function(*args, **kwargs)  # somebody wants to see every op
        # Before the function runs, which may change its arguments.
        call = KeyedCall(args, kwargs)
        self._calls += 1
        # Never changed in place: another thread may be in this loop.
        for program in self.programs:
            locals_ = program.stands_for(call)
            if locals_ is not None:
                break
        else:
            return self._miss(call)
        self._misses.replays += 1
        if program is not self.programs[0]:
            self._use_first(program)
        if self._check and (self._check is True or _is_sampled(self._calls)):
            return compared(self.function, program, call)
        return program.replay(call.flat, locals_)

    def _miss(self, call: KeyedCall) -> Any:
        """A call that no program stands for: record it, or run it if that is not worth it."""
        with self._lock:
            if self.programs:
                self._misses.explain(self.programs[0].why_not(call))
            if not self._misses.may_record() or not can_watch():
                with _unnoted_writes(), _without_events():
                    outputs = self.function(*call.args, **call.kwargs)
                _drop_lineage(outputs, call)
                return outputs
            return self._record(call)

    def _use_first(self, program: Program) -> None:
        """Ask this program before the others from now on."""
        with self._lock:
            self.programs = [program, *(p for p in self.programs if p is not program)]

    def _record(self, call: KeyedCall) -> Any:
        """Run the function for one call, and keep a program of it if that is sound."""
        # Before anything runs, so that a refusal leaves no side effects.
        check_arguments(call.flat)
        reads = Reads(self._unguarded)
        # All that the call begins with is remembered before the function can change any of it.
        reads.start([(self.function, None), *_arguments(call)])
        watch = Watch(reads, self._unguarded)
        # Ranks may differ in when they record again, and comparing plain operands is collective.
        quiet = uncompared() if self._misses.recordings else nullcontext()
        self._misses.recordings += 1
        with traced() as collectives, quiet, _in_recording():
            recorder = Recorder(reads, watch, GlobalState(*call.key[-1]), collectives)
            for index, value in enumerate(call.flat):
                if isinstance(value, Tensor):
                    # Before any step: `Trace.node_of` asks for known nodes first, so an argument
                    # that is a tensor from outside as well is read from each call.
                    recorder.trace.add_argument(value, index)
            # The watch is innermost, so it sees the function alone; the snapshot outermost, so that
            # wrappers are restored whatever happens.
            with recorder.trace.snapshot, recorder, watch.running():
                outputs = self.function(*call.args, **call.kwargs)
        # Outside of the mode, and before anything is concluded: it raises what the function
        # swallowed.
        modes = recorder.finish()
        _drop_lineage(outputs, call)
        # After the run: what cannot be guarded matters only if code could read it.
        check_visible(reads)
        # The caller gets what the run gave; the next call of this kind is recorded again.
        if self._has_changes(call, reads):
            return outputs
        # May refuse, though the function has run: only now is it known what it returns.
        made, results = plan_outputs(outputs, call.flat, recorder.trace)
        recorder.trace.graph.output(tuple(results))
        parts = Parts(
            call.key,
            recorder.trace,
            made,
            ModuleGuard(reads.modules),
            recorder.gradients,
            modes,
            # Made last: it takes what all places hold now, which is what they held before.
            StateGuard(reads),
        )
        program = Program(parts, self._transform)
        self.programs = [program, *self.programs][:MOST_PROGRAMS]
        return outputs

    def _has_changes(self, call: KeyedCall, reads: Reads) -> bool:
        """Whether the function changed Python state, which a replay would not do again.

        What is made once (the state of an optimizer, a cache) is there before the next recording.

        Raises:
            CaptureError: it changed some in two recordings of the same kind of call.
        """
        found = own_changes(reads)
        # Arguments are no places: the key has them, as they were before the call.
        if not call.is_as_it_was():
            found.append(Origin(None, "an argument", ""))
        if not found:
            self._changing = None
            return False
        # Once may be an initialization; the second time in a row it is what each call does.
        if self._changing == call.key:
            self._changing = None
            raise changed_error(found, reads)
        self._changing = call.key
        return True


def _arguments(call: KeyedCall) -> list[tuple[Any, Origin | None]]:
    """What the arguments of a call lead to, for the walk."""
    origin = Origin(None, "an argument", "")
    return [(value, origin) for value in outside_arguments(call.flat)]


def _is_sampled(calls: int) -> bool:
    """Whether this call is compared. All ranks count the same calls."""
    return calls == _EARLY or calls & (min(calls, _RARELY) - 1) == 0


@contextmanager
def _in_recording() -> Iterator[None]:
    """Captured functions that are called in the block run, and are part of this recording."""
    token = _recording.set(True)
    try:
        with _unnoted_writes():
            yield
    finally:
        _recording.reset(token)


@contextmanager
def _unnoted_writes() -> Iterator[None]:
    """Note no lineage of writes: other ranks may replay this call, and a replay notes none."""
    pause.depth += 1
    try:
        yield
    finally:
        pause.depth -= 1


@contextmanager
def _without_events() -> Iterator[None]:
    """Add no events of the mesh: other ranks may replay this call, and a replay adds none."""
    token = unrecorded.set(True)
    try:
        yield
    finally:
        unrecorded.reset(token)


def _drop_lineage(outputs: Any, call: KeyedCall) -> None:
    """Leave outputs as a replay does: ranks may differ in when they record again."""
    for value in tensors_in(outputs):
        # An argument that is returned keeps its own: it is the caller's.
        if isinstance(value, DTensor) and all(value is not given for given in call.flat):
            value._lineage = 0


def capture(
    function: Callable[..., Any],
    *,
    check: Check = False,
    transform: Transform | None = None,
    unguarded: Iterable[str] = (),
) -> Captured:
    """Record a function, or module, on DTensors once, and replay it without DTensors.

    The first call of each kind runs as ever, and is recorded as a `torch.fx` graph of what it did
    on local tensors: torch functions, collectives, autograd nodes. Later calls run the graph: no
    wrappers, no dispatch, no modules. Autograd works through it; random ops draw the numbers that
    eager would; what is written in place is written; parameters are read anew at each call.

    A call is of the same kind if these are the same: form, types and values of Python arguments;
    layout, shape, strides, dtype, device, `requires_grad` and aliasing of tensors; grad, inference
    and autocast mode, default dtype and device, the policy of random numbers; train flags, hooks,
    parameters, buffers and submodules of modules; and all other Python state outside that code
    which ran could read: closures, defaults, globals, attributes, contents of containers. The code
    of torch, numpy, the standard library and these packages counts as constant.

    Where the function itself changes such state, a first call is run and not recorded, since it may
    make what later calls find (a cache, the state of an optimizer). After 32 programs, others are
    recorded only as replays pay for them, and what changes again and again is named by a warning.

    Args:
        function: a function, or an `nn.Module` (its hooks are recorded with it).
        check: run the function beside each replay and compare everything: slow, for finding state
            that guards do not see. "sampled" does so in the second, third, fourth, eighth, … call,
            and from the 1,024th on in every 1,024th: less than 0.2 % of the time of a long run.
        transform: called with the `torch.fx.GraphModule` of each new program; what it returns runs
            in its place (`torch.compile`, say).
        unguarded: names of attributes, globals, closure variables and functions that replays may
            ignore: what they hold is neither followed nor compared.

    Returns:
        A callable of the same arguments and results; see `Captured`.

    Raises:
        CaptureError: when recording, with the line of code, if values of tensors reach Python or
            decide shapes, if state is read that cannot be compared (an iterator), or if the
            function changes Python state in call after call; with `check`, if a replay differs.

    Under `explain()` and `strict()`, which want to see every op, the function itself runs.
    """
    names = frozenset(unguarded)
    return Captured(function, check=check, transform=transform, unguarded=names)
