"""The torch function mode under which a function runs once while every step is noted.

A call with DTensors goes into this package's dispatch with the mode still active, so what is
recorded are the calls on local tensors inside. A call on plain tensors is a step itself: it runs,
and becomes a node. Collectives, shared-use nodes and random fills appear as single calls (see
`_torch/overridable.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from vescale_comm import Trace as Collectives
from vescale_comm.nested import tensors_within

from vescale_dtensor._autograd.function_bridge import joined_local
from vescale_dtensor._autograd.leaf_gradient import LeafGradient
from vescale_dtensor._autograd.leaf_use import leaf_for_use
from vescale_dtensor._capture.guard.global_state import (
    GlobalState,
    global_state,
    set_autocast,
)
from vescale_dtensor._capture.guard.named_state import NamedState
from vescale_dtensor._capture.record.constants import Constants, is_readable
from vescale_dtensor._capture.record.graph import TracedGraph
from vescale_dtensor._capture.record.module_names import ModuleNames
from vescale_dtensor._capture.record.refusals import Done, check_not_replaced, run_plainly
from vescale_dtensor._capture.record.regions import Regions
from vescale_dtensor._capture.record.step_arguments import as_node, is_in_place, written_by_name
from vescale_dtensor._capture.record.surroundings import (
    HOOKS_OF_SAVED_TENSORS,
    ProgramModes,
    Surroundings,
)
from vescale_dtensor._capture.record.unsupported import (
    ASKED,
    FIXED,
    METADATA,
    OF_FUNCTION,
    READERS,
    UNGUARDED,
    called_by_us,
    check_recordable,
    name_of,
    refusal,
    user_line,
)
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._inspect.op_support import public_name
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.notation import short, short_dtype
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import (
    dispatch_modes,
    jit_traces,
    overrides_enabled,
    set_grad_mode,
    storage_identity,
)
from vescale_dtensor._torch.transforms import in_transform

_GETTER = "__get__"
_MODES = frozenset({"_set_grad_enabled", "set_grad_enabled"})
# In C, here and where lists are made in place of generators: a recording asks for every tensor.
_requires_grad = operator.attrgetter("requires_grad")
# A context variable, as ranks of a simulation are threads of one process.
_recording: ContextVar[Recorder | None] = ContextVar("vescale_dtensor_recording", default=None)


@cache
def watch_steps() -> None:
    """Have recordings refuse steps of optimizers.

    Called when a function is captured: importing the package registers no hooks, and registering
    one while a step runs its hooks, as another thread may, would be an error there.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, *_: Any) -> None:
    """The hook before every step of any optimizer."""
    recorder = _recording.get()
    if recorder is not None:
        recorder.refuse_step(optimizer)


_layout, _STRIDED = operator.attrgetter("layout"), frozenset({torch.strided})
_is_wrapper = type.__subclasscheck__.__get__(DTensor)


class Recorder(TorchFunctionMode):
    """Records what runs under it.

    Args:
        state: what the code of the function names.
        start: the modes in which the call begins.
        collectives: those that the call has made so far.
        runs_on: whether what follows a refusal runs unrecorded; else the refusal is raised.

    Attributes:
        trace: the graph.
        gradients: whether gradients are read, set or accumulated.
        failure: the words of the first refusal, in case that user code caught it. Not the error,
            whose traceback leads back here: such a cycle keeps all tensors of a refused call, and
            hooks of a checkpoint that it left, until garbage is collected.
        layouts: one for each mesh of the DTensors that it met, by the id of the mesh.
        regions: what backward computes again.
        modes: in which the program is at its last step.
    """

    def __init__(
        self,
        state: NamedState,
        start: GlobalState,
        collectives: Collectives,
        *,
        runs_on: bool,
    ) -> None:
        super().__init__()
        self._runs_on = runs_on
        self.trace = TracedGraph(state.tensors, state.has_met)
        self.gradients = False
        self.failure: str | None = None
        self.layouts: dict[int, Layout] = {}
        self._start = start
        self._collectives = collectives
        self.modes = ProgramModes(self.trace.graph, start)
        self._surroundings = Surroundings(start)
        self.regions = Regions(self, self._surroundings)
        # The public op being dispatched, and the user's line: nodes are named after these.
        self._call: tuple[str, str] | None = None
        self._modules = ModuleNames()
        self._hooks: list[Any] = []
        self._constants = Constants(self.trace.known_node)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The block in which the function runs."""
        token = _recording.set(self)
        try:
            # The snapshot is outermost: wrappers are restored whatever happens.
            with self.trace.snapshot, self, self.regions.recording():
                yield
        except SystemError as error:  # C++ calls functions, and lets no error of a mode through
            if self.failure is None:
                raise
            raise CaptureError(self.failure) from error.__cause__
        finally:
            _recording.reset(token)

    def refuse_step(self, optimizer: Any) -> None:
        """Refuse the step of an optimizer."""
        if self._runs_on and self.failure is not None:
            return
        error = refusal(
            f"the step of an optimizer ({type(optimizer).__name__}), of which replays would keep "
            "the numbers (a learning rate). Take the step outside; joint(...).with_optimizer, and "
            "vescale_parallel.graph.train_step, have it in the graph"
        )
        self.failure = self.failure or str(error)
        if not self._runs_on:
            raise error

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """See one call."""
        kwargs = kwargs or {}
        # A wrapper is asked about itself; or what guards fix, by far the most calls.
        if not overrides_enabled() or (func in FIXED and type(args[0]) is not DTensor):
            return func(*args, **kwargs)
        if self.regions.paused:
            return func(*args, **kwargs)
        if self._runs_on and self.failure is not None:
            self._note_meshes((args, kwargs))
            return run_plainly(func, types, args, kwargs)  # nothing is recorded any more
        done = Done()
        try:
            return self._recorded(func, types, args, kwargs, done)
        except CaptureError as error:
            # One that the call itself raises is the function's own.
            if done.started and not done.results:
                self.failure = self.failure or (None if self._runs_on else str(error))
                raise
            # Remembered: a `try` in the function may swallow the error, and the run then continues
            # with a program that lacks this step.
            self.failure = self.failure or str(error)
            if not self._runs_on:
                raise
        return done.results[0] if done.results else run_plainly(func, types, args, kwargs)

    def _recorded(
        self, func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any], done: Done
    ) -> Any:
        """Run a call and record it."""
        if _is_looked_into() or dispatch_modes() > self.regions.modes:
            raise refusal(
                "a transform (torch.func, vmap, forward_ad), a tracer or a dispatch mode (make_fx, "
                "FakeTensorMode) is active inside, which a replay would leave out. Call it "
                "outside, and pass what it gives"
            )
        if isinstance(func, FunctionType):
            check_not_replaced(func)
        if any(map(_is_wrapper, types)):
            return self._through(func, types, args, kwargs, done)
        return self._local(func, args, kwargs, done)

    # --- calls with DTensors

    def _through(
        self, func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any], done: Done
    ) -> Any:
        """Dispatch a call with DTensors; its calls on local tensors are seen, too."""
        name = name_of(func)
        # A public op may call others (a composition): only the one that the user wrote is checked.
        outermost = self._call is None
        if outermost:
            check_recordable(name, args, kwargs)  # before any communication
            if name == "retain_grad" and not args[0].is_leaf:
                raise refusal(
                    "retain_grad() of a tensor inside, that a replay would not renew. Return it, "
                    "and call retain_grad() on what is returned"
                )
            self._call = public_name(func), user_line()
        # Before dispatch leaves caches on them, which the snapshot has to take off again.
        for wrapper in self._note_meshes((args, kwargs)):
            self.trace.meet(wrapper)
        try:
            # torch switches the mode off while it handles a call; entered again, it sees the local
            # calls that dispatch makes.
            with self:
                result = done.run(DTensor.__torch_function__, func, types, args, kwargs)
        finally:
            if outermost:
                self._call = None
        for made in tensors_within(result):
            self._note_layout(made)
        return result

    def _note_meshes(self, given: Any) -> list[DTensor]:
        """The DTensors of a call, whose meshes are noted."""
        found = [value for value in tensors_within(given) if isinstance(value, DTensor)]
        for wrapper in found:
            self.layouts.setdefault(id(wrapper._spec.layout.mesh), wrapper._spec.layout)
        return found

    def _note_layout(self, wrapper: Tensor) -> None:
        """Keep the layout of a result, for the listing."""
        if isinstance(wrapper, DTensor) and self.trace.has_node(wrapper._local_tensor):
            spec = wrapper._spec
            node = self.trace.node_of(wrapper._local_tensor)
            node.meta["layout"] = short(spec.shape, spec.tensor_meta.dtype, spec.layout)

    # --- calls on plain tensors

    def _local(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], done: Done
    ) -> Any:
        """Run a call on plain tensors, and make a node of it if it is a step."""
        if func is joined_local:
            args[0]._may_have_hidden_node = True  # its next use, outside, joins it
            raise refusal(OF_FUNCTION)
        name = name_of(func)
        # Modes are sampled at each step instead; metadata is fixed by guards.
        if name in _MODES or name in METADATA or (name in ASKED and called_by_us()):
            return done.run(func, *args, **kwargs)
        getter = getattr(func, "__name__", "") == _GETTER
        if getter and not isinstance(value := done.run(func, *args, **kwargs), Tensor):
            return self._python_value(func, name, value)
        given = tensors_within((args, kwargs))
        _require_strided(name, given)
        constant = self._constants.holds(given)
        # The value follows from Python values that are guarded, so every replay would read the
        # same.
        if constant and given and is_readable(name):
            return done.run(func, *args, **kwargs)
        if not constant or name in READERS:
            check_recordable(name, args, kwargs)
        self._surroundings.check(func, name)
        if func is leaf_for_use:
            return self._leaf_for_use(done, *args)
        # Before the call, which may change what the tensors are.
        nodes = self.trace.argument(args), self.trace.argument(kwargs)
        # Compared after the call, these show what it wrote to, whatever its name.
        versions = _versions(given)
        # Grad mode makes a difference only where an operand requires grad, or a result does.
        sensitive = name != "detach" and any(map(_requires_grad, given))
        sent = len(self._collectives.records)
        result = done.run(func, *args, **kwargs)
        made = tensors_within(result)
        if not given and isinstance(result, torch.device):
            return result  # torch.device("cpu"), which follows from Python values alone
        # No tensor came of it: Python got a value, of which a replay would know nothing.
        if not made and not _is_step(func, name, result):
            return self._python_value(func, name, result)
        # Asked after each step, so that what moves a generator between steps is told from steps.
        drew = self._surroundings.drew()
        now = _versions(given)
        changed = [t for t, v, n in zip(given, versions, now, strict=True) if v != n]
        # Fused optimizers, and what runs in inference mode, count no versions.
        changed += written_by_name(func, name, args, kwargs)
        written = bool(changed) or is_in_place(name)
        # Before the node is made: a change of modes has to come first in the graph.
        self.modes.follow(GlobalState(*global_state()), sensitive or any(map(_requires_grad, made)))
        records = self._collectives.records[sent:]
        node = self._node(func, records[0].op if len(records) == 1 else None, nodes)
        # Dead code is removed later. A step that draws, writes or communicates stays, even if
        # nobody uses its result: later draws would shift, other ranks would wait. A generator that
        # is passed is not among those whose states are compared.
        effect = drew or written or not made or "generator" in kwargs
        node.meta["effect"] = effect or bool(records)
        node.meta["records"] = tuple(records)
        node.meta["writes"] = [storage_identity(tensor) for tensor in changed]
        self.trace.written.update(node.meta["writes"])
        # In this order: what this step wrote is noted after its new memory is cleared.
        self._constants.forget(made, given)
        self._constants.note(node, func, changed, constant and not drew and not records)
        for tensor in given:
            # An in-place step may have given it a node; noted here, or `TracedGraph.node_of`
            # would take it for a change that no recorded step made.
            self.trace.changed(tensor)
        if sensitive and changed:
            self.trace.changed_in_memory(changed)
        self._results(result, node)
        self._notice(name, args, result)
        return result

    def _leaf_for_use(
        self, done: Done, leaf: LeafGradient, local: Tensor, varying: int, shape: Any
    ) -> Tensor:
        """A use of a leaf: no step where it takes the local tensor as it is."""
        node = self.trace.node_of(local)
        result: Tensor = done.run(leaf_for_use, leaf, local, varying, shape)
        outside = self.trace.leaf_used(leaf, varying)
        # All that happens here is that the use is noted, and a program notes all uses at once.
        if result is local and outside:
            return result
        # The alias has a history, or none, by grad mode.
        self.modes.follow(GlobalState(*global_state()), True)
        arguments = (self.trace.leaf_node(leaf), node, varying, tuple(shape))
        step = self._node(leaf_for_use, None, (arguments, {}))
        step.meta["effect"] = not outside  # it notes the use, which a program does at its beginning
        self._results(result, step)
        return result

    def _python_value(self, func: Callable[..., Any], name: str, result: Any) -> Any:
        """Let Python have a value that is no tensor, if guards fix it; else refuse."""
        if getattr(func, "__name__", "") == _GETTER:
            # Python may branch on whether there is a gradient, so the guard compares that.
            self.gradients |= name in ("grad", "_grad")
            if name not in UNGUARDED and (name != "grad_fn" or result is None):
                return result
        # Dispatch reads metadata in its own code; what it concludes follows from specs, which are
        # guarded.
        if called_by_us():
            return result
        # torch 2.11's checkpoint(use_reentrant=False) asks for this before it sets its hooks.
        if type(result).__name__ == "_NoopSaveInputsBackward":
            raise refusal(HOOKS_OF_SAVED_TENSORS)
        raise refusal(
            f"{name} gives Python a {type(result).__name__} that a replay would not renew. "
            "Keep to tensors, or call it outside"
        )

    # --- nodes

    def _node(self, func: Any, title: str | None, arguments: tuple[Any, dict[str, Any]]) -> fx.Node:
        """The node of a call; `title` is what to name it after, if not the function."""
        kind, target, args, kwargs = as_node(func, *arguments)
        # Arguments afterwards: fx looks for symbolic numbers in those that a node is made with.
        node = self.trace.graph.create_node(kind, target, name=title)
        node.args = tuple(args)
        if kwargs:
            node.kwargs = kwargs
        node.meta["op"], node.meta["line"] = self._call or (public_name(func), user_line())
        node.meta["module"] = self._modules.now()
        return node

    def _results(self, result: Any, node: fx.Node) -> None:
        """Remember which node made each tensor of a result."""
        if isinstance(result, Tensor):
            if not self.trace.has_node(result):  # what returns its operand makes nothing
                self.trace.set_node(result, node)
                node.meta["local"] = f"{short_dtype(result.dtype)}{list(result.shape)}"
                node.meta["grad"] = result.requires_grad
                if result.layout is torch.strided:
                    # `_remove_copies` asks which tensors share memory, when they may be gone.
                    node.meta["memory"] = storage_identity(result), result.stride()
        elif isinstance(result, list | tuple):
            for index, item in enumerate(result):
                if tensors_within(item):
                    part = self.trace.graph.call_function(operator.getitem, (node, index))
                    self._constants.pass_on(node, part)
                    self._results(item, part)

    def _notice(self, name: str, args: Any, result: Any) -> None:
        """Note what a step has to do with gradients and hooks."""
        # Before anything looked at gradients (`zero_grad` first): the program runs the same whether
        # there was one or not, so that is not guarded.
        if name == "drop_gradient" and not self.gradients:
            self.trace.dropped_gradients.add(args[1])  # what gradient it had does not matter
        elif name in (
            "grad",
            "_grad",
            "backward",
            "_reduce_leaf",
            "drop_gradient",
            "_assign_gradient",
        ):
            self.gradients = True
        if hasattr(result, "hooks_dict_ref"):
            self._hooks.append(result)

    def finish(self) -> bool:
        """End the program in the modes in which it began; whether it changes any on the way.

        Raises:
            CaptureError: something was refused, or undone behind the recording's back.
        """
        # First, since a function that swallowed the error may have left anything behind.
        if self.failure is not None:
            raise CaptureError(self.failure)
        # What changed after the last step shows here: eager would leave it so, a replay does not.
        self._surroundings.check(None, "")
        if torch.is_grad_enabled() != self._start.grad:
            raise refusal(
                "the function leaves another grad mode than it found, which a replay would not. "
                "Change it outside, or with no_grad() around steps"
            )
        # Removing a hook is a change of a dict, which no mode sees: a replay would leave the hook.
        for handle in self._hooks:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id not in hooks:
                raise refusal(
                    "a gradient hook is registered and removed inside, where replays would keep "
                    "the first. Do it outside"
                )
        self.modes.follow(self._start, True)
        self.trace.check_histories()
        # Last: uses that follow in later steps would be missing.
        self.trace.note_leaves()
        return any([n.target in (set_grad_mode, set_autocast) for n in self.trace.graph.nodes])


def _is_looked_into() -> bool:
    """Whether a transform or a tracer of torch is active."""
    return bool(in_transform() or jit_traces())


def _require_strided(name: str, given: list[Tensor]) -> None:
    if not _STRIDED.issuperset(map(_layout, given)):
        raise refusal(
            f"{name} of a tensor that is not strided (sparse, say), whose memory a recording "
            "cannot tell apart. Call it outside, and pass what it gives"
        )


def _is_step(func: Callable[..., Any], name: str, result: Any) -> bool:
    """Whether a call that returned no tensor is one for its effect."""
    if getattr(func, "__name__", "") == _GETTER:
        return False
    # None: a write, a collective, `backward`. A handle: `register_hook`.
    return result is None or hasattr(result, "hooks_dict_ref")


def _versions(tensors: list[Tensor]) -> list[int]:
    """The versions of tensors, which grow with each write that torch sees."""
    # Tensors of inference mode count no versions, and raise when asked.
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
