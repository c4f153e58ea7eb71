"""`capture`: record a function once for each kind of call, and replay it from then on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import update_wrapper
from threading import Lock, RLock, get_ident, main_thread
from types import MethodType
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import trace as traced

from vescale_dtensor._capture.guard.call_key import KeyedCall, check_arguments, kind_of, met_in
from vescale_dtensor._capture.guard.free_tensors import ArgumentTensors, Outsiders
from vescale_dtensor._capture.guard.global_state import GlobalState
from vescale_dtensor._capture.guard.module_guards import ModuleGuard
from vescale_dtensor._capture.guard.named_state import NamedState
from vescale_dtensor._capture.guard.own_changes import changed_error, own_changes
from vescale_dtensor._capture.guard.places import Origin
from vescale_dtensor._capture.guard.state_guard import StateGuard
from vescale_dtensor._capture.nesting import is_alone, is_inside, run_uncompared, running_inside
from vescale_dtensor._capture.record.outputs import drop_lineage, plan_outputs
from vescale_dtensor._capture.record.recorder import Recorder, watch_steps
from vescale_dtensor._capture.record.refusals import place_of, tell_others
from vescale_dtensor._capture.replay.comparisons import Comparisons, check_of, why_left_out
from vescale_dtensor._capture.replay.misses import MOST_PROGRAMS, Misses
from vescale_dtensor._capture.replay.program import Parts, Program, Transform
from vescale_dtensor._capture.replay.replay_check import (
    Check,
    ReplayCheck,
    SeenLayouts,
    agreed,
    in_order,
)
from vescale_dtensor._dispatch.plain_operands import uncompared
from vescale_dtensor._dispatch.registry import on_change
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._layout.execution_events import all_say
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._tensor.observers import observers
from vescale_dtensor._torch.compat import dispatch_modes, function_modes, jit_traces
from vescale_dtensor._torch.transforms import in_transform
from vescale_dtensor._torch.worlds import on_world_change

Refused = Literal["raise", "run"]
is_compiling = torch.compiler.is_compiling

_making = Lock()
_MAIN = main_thread().ident
# As many programs are asked one after the other; of more, those for a call are looked up.
_FEW = 4
# What `capture` does unless told otherwise.
_SAMPLED = ReplayCheck()

# Every captured function: what was recorded by rules that have changed since is recorded anew.
# Weak: a captured function lives as long as its user wants it.
_alive: WeakSet[Captured] = WeakSet()
# How many functions of a place in a file were captured: ranks tell by these which of them they
# speak of, also where one rank captures some that others do not.
_numbers: Counter[str] = Counter()


@on_change
def _forget_programs() -> None:
    """Drop all programs: a rule has changed that they may have been recorded by."""
    # A copy: a garbage collection may take some out of the set meanwhile.
    for captured in tuple(_alive):
        captured._keep_programs([])


@on_world_change
def _begin_anew() -> None:
    """Forget what belongs to a world that is gone: programs hold its meshes, and so its sockets."""
    for captured in tuple(_alive):
        captured._leave_world()


class Captured:
    """A function that is recorded once for each kind of call, and replayed from then on.

    Make one with `capture`.

    A function that is captured where a class defines it is a method of that class.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        check: ReplayCheck | None,
        transform: Transform | None,
        unguarded: frozenset[str],
        refused: Refused,
        mesh: DeviceMesh | None,
    ) -> None:
        watch_steps()
        self._function, self._mesh = function, mesh
        self._refusal: str | None = None
        self._runs_on = refused == "run"
        self._check, self._transform, self._unguarded = check, transform, unguarded
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._place = place_of(function, self._name)
        _numbers[self._place] += 1
        self._number = _numbers[self._place]
        self._misses = Misses(self._name)
        self._leave_world()
        # For ranks of a simulation, which are threads of one process and may share this function:
        # each has one of its own. Else one rank would hold the lock that another one waits for.
        self._twins: WeakKeyDictionary[Any, Captured] = WeakKeyDictionary()
        # The key of the last call in whose recording the function changed Python state.
        self._changing: tuple[Any, ...] | None = None
        # Re-entrant: a function that runs unrecorded may call its captured self.
        self._lock = RLock()
        _alive.add(self)
        if not isinstance(function, nn.Module):
            update_wrapper(self, function)

    def _leave_world(self) -> None:
        """Begin as if never called, but for a refusal."""
        self._keep_programs([])
        # Whether every rank has refused it, and nothing of it will ever be replayed.
        self._is_eager = False
        # Calls of the thread that made the first one: those of others come in any order.
        self._made, self._thread = 0, 0
        left_out = why_left_out(bool(self._unguarded), self._transform is not None)
        self._compared = Comparisons(self._check, self._name, self._function, left_out)
        # Whether there was a call that is not `_alone`: all ranks make the first one together,
        # whatever they make of it.
        self._started = False
        # Of the DTensors of the first call, which all ranks make together; None before it.
        self._layouts: list[Layout] | None = None

    def _keep_programs(self, programs: list[Program]) -> None:
        """Keep these, the last used first."""
        of_kind: dict[Hashable, list[Program]] = {}
        for program in programs:
            of_kind.setdefault(kind_of(program.key), []).append(program)
        # New objects: other threads may be in loops over those that there were.
        self._programs, self._of_kind = programs, of_kind

    def _as_new(self, function: Callable[..., Any]) -> Captured:
        """Another one with these options, of which nothing is recorded."""
        refused: Refused = "run" if self._runs_on else "raise"
        return Captured(
            function, self._check, self._transform, self._unguarded, refused, self._mesh
        )

    def __copy__(self) -> Captured:
        return self._as_new(self._function)

    def __deepcopy__(self, memo: dict[int, Any]) -> Captured:
        # Programs hold the tensors of what is copied, not those of the copy.
        return self._as_new(deepcopy(self._function, memo))

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        binds = owner is not None and hasattr(type(self._function), "__get__")
        return MethodType(self, owner) if binds else self

    @property
    def function(self) -> Callable[..., Any]:
        """The function or module itself, which stays: programs are of it alone."""
        return self._function

    def _of_this_rank(self) -> Captured:
        """Itself; on a rank of a simulation, the one of that rank."""
        if get_ident() == _MAIN:  # which is a rank of no simulation
            return self
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is None or dist.get_backend(world) != "simulated":
            return self
        with _making:
            if not self._twins:
                # Of a rank there is one only, and most functions are captured by their rank.
                self._twins[world] = self
            if world not in self._twins:
                self._twins[world] = self._as_new(self._function)
            return self._twins[world]

    def _own(self) -> Captured:
        return self._of_this_rank() if self._twins else self

    @property
    def programs(self) -> list[Program]:
        """What was recorded, the last used first."""
        return self._own()._programs

    @property
    def refusal(self) -> str | None:
        """With `refused="run"`, why nothing is recorded any more; None while calls are recorded.

        The words of the error that would have been raised.
        """
        return self._own()._refusal

    @property
    def replays(self) -> int:
        """How many calls were replayed."""
        return self._own()._misses.replays

    @property
    def comparisons(self) -> int:
        """How many of these were compared with the function, which ran as well."""
        return self._own()._compared.count

    @property
    def uncompared(self) -> str | None:
        """Why replays, or a part of what they give, are not compared with the function, if so."""
        return self._own()._compared.why_not(self._own()._programs)

    @property
    def is_together(self) -> bool:
        """Whether a call now is one that every rank makes, by itself and not within another one."""
        own = self._of_this_rank()
        return not (is_inside() or is_alone() or is_compiling()) and own._thread == get_ident()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function itself, where other ranks may replay: nothing is looked up or kept."""
        if is_inside() or is_compiling() or self._is_eager:
            return self._function(*args, **kwargs)
        return self._of_this_rank()._run(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the program for this call; record it first if there is none."""
        if is_inside() or is_compiling() or self._is_eager:
            return self._function(*args, **kwargs)
        if self._check is not None and (own := self._of_this_rank()) is not self:
            return own(*args, **kwargs)
        alone = is_alone()
        self._thread = self._thread or get_ident()
        counted = not alone and get_ident() == self._thread
        self._made += counted
        due = counted and self._made >= self._compared.following
        due = due and self._compared.is_due(self._made, self._layouts)
        if observers or dispatch_modes() or jit_traces() or function_modes() or in_transform():
            if due:
                agreed(self._layouts, False)
            # Somebody wants to see every op.
            return self._of_this_rank()._run(args, kwargs)
        if self._refusal is not None and not self._programs and not due:
            return self._of_this_rank()._run(args, kwargs, inside=False)
        # Before the function runs, which may change its arguments.
        call = KeyedCall(args, kwargs)
        # Never changed in place: another thread may be in this loop. The first call is no replay,
        # even if this rank has recorded some alone: what it executes is compared over ranks.
        programs: Sequence[Program] = self._programs if self._started or alone else ()
        if len(programs) > _FEW and programs[0].key != call.key:
            programs = self._of_kind.get(call.kind(), ())
        for program in programs:
            # Asked here, as most programs of other calls differ in it: no Python call for each.
            if program.key == call.key and (locals_ := program.stands_for(call)) is not None:
                break
        else:
            if due:
                agreed(self._layouts, False)
            return self._miss(call)
        self._misses.replays += 1
        if program is not self._programs[0]:
            self._use_first(program)
        if due:
            return self._compared.run(program, call, locals_, self._layouts or ())
        return program.replay(call.flat, locals_)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, inside: bool = True) -> Any:
        """Run the function itself, where other ranks may replay: leave no trace that they miss.

        `inside`: captured functions that it calls just run as well.
        """
        if not self._started and self._begins():
            # What the first call executes is compared over ranks, also where some of them record
            # it: then captured functions that it calls just run.
            with running_inside(), SeenLayouts() as seen:
                outputs = self._function(*args, **kwargs)
            self._layouts = in_order(seen.found)
        else:
            outputs = run_uncompared(self._function, args, kwargs, inside)
        drop_lineage(outputs, (*args, *kwargs.values()))
        return outputs

    def _miss(self, call: KeyedCall) -> Any:
        """A call that no program stands for: record it, or run it if that is not worth it."""
        if (own := self._of_this_rank()) is not self:
            return own(*call.args, **call.kwargs)
        if self._refusal is not None:
            return self._run(call.args, call.kwargs, inside=False)
        with self._lock:
            if self._programs and self._misses.wants_reason():
                self._misses.explain(self._programs[0].why_not(call))
            if self._misses.may_record(call.kind()):
                return self._record(call)
        return self._run(call.args, call.kwargs)

    def _begins(self) -> bool:
        """Whether this is the first call, which all ranks make together."""
        first = not self._started and not is_alone()
        self._started |= first
        return first

    def _use_first(self, program: Program) -> None:
        """Ask this program before the others from now on."""
        with self._lock:
            self._programs = [program, *[p for p in self._programs if p is not program]]
            kind = kind_of(program.key)
            others = [p for p in self._of_kind.get(kind, ()) if p is not program]
            self._of_kind[kind] = [program, *others]

    def _record(self, call: KeyedCall) -> Any:
        """Run the function for one call, and keep a program of it if that is sound."""
        given = ArgumentTensors(call)
        try:
            # Before anything runs, so that a refusal leaves no side effects.
            check_arguments(call.flat)
        except CaptureError as error:
            if not self._runs_on:
                tell_others(error, self._place, call.flat, {})
            self._refuse(str(error))
            return self._run(call.args, call.kwargs, inside=False)
        state = self._named_state(call)
        # Ranks may differ in when they record again, and comparing plain operands is collective.
        first = self._begins()
        quiet = nullcontext() if first else uncompared()
        self._misses.recordings += 1
        recorder: Recorder | None = None
        try:
            with traced() as collectives, quiet, running_inside():
                start = GlobalState(*call.key[-1])
                recorder = Recorder(state, start, collectives, runs_on=self._runs_on)
                for index, value in enumerate(call.flat):
                    if isinstance(value, Tensor):
                        # Before any step: `TracedGraph.node_of` asks for known nodes first, so an
                        # argument that is a tensor from outside as well is read from each call.
                        recorder.trace.add_argument(value, index)
                with recorder.recording():
                    outputs = self._function(*call.args, **call.kwargs)
        except CaptureError as error:
            if self._runs_on or recorder is None:
                raise  # one of the function's own
            tell_others(error, self._place, call.flat, recorder.layouts)
        try:
            if first:  # also where it is refused: other ranks may go on comparing
                self._layouts = in_order(recorder.layouts)
            self._keep(call, state, recorder, given, outputs)
        except CaptureError as error:
            # The function has run: its outputs are those of this call.
            if not self._runs_on:
                tell_others(error, self._place, call.flat, recorder.layouts)
            self._refuse(str(error))
            drop_lineage(outputs, call.flat)
        return outputs

    def _named_state(self, call: KeyedCall) -> NamedState:
        """What the function, and what it is given, name, as it is now."""
        argument = Origin(None, "an argument", "")
        given = [(value, argument) for value in met_in(call.flat)]
        return NamedState(
            [(self._function, Origin(None, "the function", "")), *given], self._unguarded
        )

    def _refuse(self, words: str) -> None:
        """Record nothing from now on, and run the function.

        What some ranks refuse and others replay is not compared over ranks. Where all of them have
        refused it, in one call, it is a function like any other.
        """
        self._refusal = words
        # From the next call on, which is the same one on all ranks: drift inside shows then.
        if not self._programs and not is_alone() and not is_inside():
            self._is_eager = all_say(
                f"refused: {self._place}, number {self._number}, call {self._made}", self._mesh
            )

    def _keep(
        self,
        call: KeyedCall,
        state: NamedState,
        recorder: Recorder,
        given: ArgumentTensors,
        outputs: Any,
    ) -> None:
        """Make a program of a call that was recorded, if that is sound.

        Raises:
            CaptureError: a replay could not do again what the function has done.
        """
        # Outside of the mode, and before anything is concluded: it raises what the function
        # swallowed.
        modes = recorder.finish()
        drop_lineage(outputs, call.flat)
        # The caller gets what the run gave; the next call of this kind is recorded again.
        if self._has_changes(call, state):
            return
        # May refuse, though the function has run: only now is it known what it returns.
        made, results = plan_outputs(outputs, call.flat, recorder.trace)
        recorder.trace.graph.output(tuple(results))
        # As it is now: what was rebuilt, and is equal, is in another place.
        now = self._named_state(call)
        parts = Parts(
            call.key,
            recorder.trace,
            made,
            ModuleGuard(now.modules),
            recorder.gradients,
            modes,
            Outsiders(state.tensors, recorder.gradients, given),
            StateGuard(now),
        )
        program = Program(parts, self._transform)
        program.uncompared = self._compared.left_out
        self._keep_programs([program, *self._programs][:MOST_PROGRAMS])

    def _has_changes(self, call: KeyedCall, state: NamedState) -> bool:
        """Whether the function changed Python state, which a replay would not do again.

        What is made once (the state of an optimizer, a cache) is there before the next recording.

        Raises:
            CaptureError: it changed some in two recordings of the same kind of call.
        """
        found = own_changes(state)
        # Arguments are no places: the key has them, as they were before the call.
        if not call.is_as_it_was() or call.has_new_attributes():
            found.append(Origin(None, "an argument", ""))
        if not found:
            self._changing = None
            return False
        # Once may be an initialization; the second time in a row it is what each call does.
        if self._changing == call.key:
            self._changing = None
            raise changed_error(found, state)
        self._changing = call.key
        return True


def capture(
    function: Callable[..., Any],
    *,
    check: Check | ReplayCheck = _SAMPLED,
    transform: Transform | None = None,
    unguarded: Iterable[str] = (),
    refused: Refused = "raise",
    mesh: DeviceMesh | None = None,
) -> Captured:
    """Record a function, or module, on DTensors once, and replay it without DTensors.

    The first call of each kind runs as ever, and is recorded as a `torch.fx` graph of what it did
    on local tensors: torch functions, collectives, autograd nodes. Later calls run the graph: no
    wrappers, no dispatch, no modules. Autograd works through it; random ops draw the numbers that
    eager would; what is written in place is written; parameters are read anew at each call.

    A call is of the same kind if these are the same: form, types and values of Python arguments;
    layout, shape, strides, dtype, device, `requires_grad` and aliasing of tensors; grad, inference
    and autocast mode, default dtype and device, the policy of random numbers; and what the code of
    the function names: globals, closures, defaults, train flags, hooks, parameters, buffers and
    submodules of modules, attributes, to any depth. All else counts as constant (docs/capture.md).

    Where the function itself changes such state, a first call is run and not recorded, since it may
    make what later calls find (a cache, the state of an optimizer). Of many shapes, a second one is
    recorded once it comes again or something was replayed, and others as replays pay for them.

    Args:
        function: a function, or an `nn.Module` (its hooks are recorded with it).
        check: which replays are compared with the function, which then runs as well: state that
            guards do not see is constant, and what changes is noticed there. By default calls 2, 4,
            8, … 1,024, and then every 1,024th: outputs, their autograd graph, what was written,
            generators. What cannot run twice is left uncompared, as `Captured.uncompared` and
            `Program.explain` say; with "sampled" it is an error. True compares every call, None
            none.
        transform: called with the `torch.fx.GraphModule` of each new program; what it returns runs
            in its place (`torch.compile`, say).
        unguarded: names of attributes, globals, closure variables and functions that replays may
            ignore: what they hold is neither followed nor compared.
        refused: what to do where a call cannot be recorded. "raise" an error; or "run" the function
            as it is, then and from then on, while programs of other calls stay. Nothing runs twice:
            the call in which it is found goes on from there. `Captured.refusal` says why, and
            captured functions that the function calls are recorded and replayed as ever, but
            without checks: other ranks may be replaying this call, in which there are none.
        mesh: whose ranks make the same calls; None: all ranks do. No others are asked for anything,
            as of a stage of a pipeline, whose blocks other stages do not have.

    Returns:
        A callable of the same arguments and results; see `Captured`.

    Raises:
        ValueError: `refused` or `check` is something else.
        CaptureError: when recording, with the line of code, if values of tensors reach Python or
            decide shapes, or if the function changes Python state in call after call; on every
            rank, if a replay that is compared differs from the function.

    Under `explain()` and `strict()`, which want to see every op, the function itself runs.
    """
    if refused not in ("raise", "run"):
        raise ValueError(f"capture: refused is 'raise' or 'run', not {refused!r}")
    names = frozenset(unguarded)
    return Captured(function, check_of(check), transform, names, refused, mesh)
