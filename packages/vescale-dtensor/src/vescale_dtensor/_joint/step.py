"""`joint`: the joint graph of a captured step, and the object that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from vescale_comm import Group, group_of

from vescale_dtensor._autograd.leaf_gradient import LeafGradient
from vescale_dtensor._autograd.local_use import leaf_gradient_of
from vescale_dtensor._capture.call_key import KeyedCall
from vescale_dtensor._capture.capture import Captured
from vescale_dtensor._capture.global_state import autocast_state, set_autocast
from vescale_dtensor._capture.program import Program
from vescale_dtensor._capture.replay_check import agreed
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._joint.clipping import Clip
from vescale_dtensor._joint.lowering import LoweredGraph
from vescale_dtensor._joint.storage import ParameterStorage
from vescale_dtensor._joint.tracing import GradientTarget, Step, StoredPlaces, trace_joint
from vescale_dtensor._joint.update import Update
from vescale_dtensor._joint.update_graph import outermost_first, with_update
from vescale_dtensor._layout.layout import Layout, axes_in
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._torch.compat import any_autocast

_TRIES = 4
"""Calls until a step is recorded: the first ones may make what later ones find (a cache)."""


@dataclass(frozen=True)
class Joint:
    """Forward, loss, backward and gradient sums of a captured step as one graph.

    Called as the step is, it returns what the step returns, without history, and sets `.grad` of
    every parameter to the total, as `loss.backward()` and reading `.grad` do: to the same bits.

    Attributes:
        graph_module: operators of torch on local tensors. It takes `arguments`, and returns the
            results of the program and then a gradient for each of `parameters` (None: unused). On
            nodes, `meta["label"]` says where it comes from (direction, op, the user's line, module,
            parameter), `meta["parameter"]` which parameter an input is, `meta["bytes"]` its size,
            and nodes with the same `meta["storage"]` share memory.
        parameters: names of the parameters, in the order of their gradients.
        run: what is called in place of the graph; see `running`.
    """

    graph_module: fx.GraphModule
    parameters: tuple[str, ...]
    run: Callable[..., Any]
    _program: Program
    _leaves: tuple[DTensor, ...]
    _owed: tuple[tuple[DTensor, int], ...]
    _returned: tuple[int, ...]
    _stored: tuple[ParameterStorage, ...] = ()
    _update: Update | None = None
    _norm: Callable[[Tensor], Tensor] | None = None
    _executed: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        executed = LoweredGraph(self.run) if isinstance(self.run, fx.GraphModule) else self.run
        object.__setattr__(self, "_executed", executed)

    def arguments(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The arguments of the graph for a call of the step: local tensors.

        Raises:
            CaptureError: the call is of another kind than that whose graph it is.
        """
        return self._arguments(KeyedCall(args, kwargs))

    def _arguments(self, call: KeyedCall) -> list[Any]:
        program = self._program
        with _lent(self._stored):
            locals_ = program.stands_for(call) if program.key == call.key else None
            if locals_ is None:
                raise CaptureError(
                    f"joint: the graph is of another kind of call: {program.why_not(call)} "
                    "differs. Make another one with joint() for such calls"
                )
        for name, leaf in zip(self.parameters, self._leaves, strict=True):
            _check_leaf(name, leaf, leaf_gradient_of(leaf))
        if any(leaf_gradient_of(leaf).partial != owed for leaf, owed in self._owed):
            raise CaptureError(
                "joint: parameters have been used in other ways since the graph was made, and "
                "their gradients are summed over other axes of the mesh. Make the graph anew"
            )
        # The graph holds its own backward: autograd would keep a history of views of parameters,
        # which may be results, and a compiler would make other code for them.
        given = [one.detach() for one in program.arguments(call.flat, locals_)]
        if self._stored:
            # Nothing reads the stand-ins: they are inputs of the program, and not of the graph.
            gone = {id(leaf) for one in self._stored for leaf in one.stand_ins}
            pairs = zip(program.sources, given, strict=True)
            given = [one for source, one in pairs if id(source.holder) not in gone]
            given += [one for each in self._stored for one in each.inputs()]
        return given if self._update is None else [*given, *self._update.arguments()]

    def with_optimizer(
        self, optimizer: Optimizer, *, max_norm: float | None = None, norm_type: float = 2.0
    ) -> Joint:
        """The same step with the update of parameters in its graph, as one more graph.

        What the optimizer holds is updated in place: no `.grad` is set of what it steps, and there
        must be none. Its numbers (learning rates, betas, ...) are read at each call, so schedulers
        work as ever; state that it lacks is made. To the bits of `optimizer.step()`, as a for-loop,
        foreach, or fused (Adam and AdamW), on summed gradients: clipping sums them, and so does
        vescale_parallel. The graph takes, behind the arguments of the step, those numbers as Python
        floats, and the tensors of the optimizer's state. Collective if gradients are clipped.

        Args:
            optimizer: `torch.optim.SGD`, `Adam` or `AdamW`.
            max_norm: clip the gradients of what the optimizer steps, as
                `torch.nn.utils.clip_grad_norm_` does, in the order of the model's `parameters()`;
                a call then returns a pair: what the step returns, and the norm.
            norm_type: of the norm.

        Raises:
            CaptureError: other optimizers; `capturable` or `differentiable` ones; numbers that are
                tensors; hooks around steps; a graph that is run in another way already.

        Examples:
            whole = joint(step, x, y).with_optimizer(optimizer, max_norm=1.0)
            loss, norm = whole(x, y)
            scheduler.step()
        """
        if self._update is not None or self.run is not self.graph_module:
            raise CaptureError(
                "joint: with_optimizer() comes first: call it on what joint() returned"
            )
        clip = None if max_norm is None else Clip(max_norm, norm_type)
        module, update, rest, spec = with_update(self, optimizer, clip)
        norm = None if clip is None else (partial(wrap, spec=spec) if spec else _itself)
        return replace(
            self, graph_module=module, run=module, _update=update, _returned=rest, _norm=norm
        )

    def running(self, run: Callable[..., Any] | fx.GraphModule) -> Joint:
        """The same step, executed otherwise.

        Args:
            run: a graph that a pass made of `graph_module`, a memory plan's `run`, a compiled
                graph: whatever takes the arguments of the graph and returns its results.
        """
        module = run if isinstance(run, fx.GraphModule) else self.graph_module
        return replace(self, graph_module=module, run=run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step and set gradients.

        Raises:
            CaptureError: the call is of another kind, or a parameter has a gradient already.
        """
        call = KeyedCall(args, kwargs)
        given = self._arguments(call)
        self._check_no_gradients()
        program, update = self._program, self._update
        program.before_writes(call.flat)
        if update is not None:
            update.before()
        # The backward is in the graph: recorded for autograd, buffers would get a history.
        with torch.no_grad(), _as_traced():
            results = list(self._executed(*given))
        program.after_writes(call.flat)
        if update is not None:
            update.after()
            for each in self._stored:
                each.written()
        split = len(results) - len(self._returned)
        for at, gradient in zip(self._returned, results[split:], strict=True):
            if gradient is not None:
                _store(self._leaves[at], gradient)
        made = program.outputs(call.flat, results[:split])
        return made if self._norm is None else (made, self._norm(results[split - 1]))

    def _check_no_gradients(self) -> None:
        held = [
            name
            for name, leaf in zip(self.parameters, self._leaves, strict=True)
            if leaf._local_tensor.grad is not None
        ]
        if self._update is not None:
            groups = self._update.optimizer.param_groups
            own = set(map(id, self._leaves))
            held += [
                "a parameter of the optimizer that the graph does not step"
                for one in (p for group in groups for p in group["params"])
                if id(one) not in own and one.grad is not None
            ]
        if held:
            raise CaptureError(
                f"joint: '{held[0]}' has a gradient already ({len(held)} parameters have). A joint "
                "graph computes totals and adds them to none: call optimizer.zero_grad() first"
            )


@contextmanager
def _as_traced() -> Iterator[None]:
    """Inside, autocast is off: the casts of the step are operators of its graph."""
    if not any_autocast():
        yield
        return
    state = autocast_state()
    set_autocast()
    try:
        yield
    finally:
        set_autocast(*state)


def _itself(local: Tensor) -> Tensor:
    return local


def _store(leaf: DTensor, gradient: Tensor) -> None:
    """Make a total the gradient of a leaf."""
    state: LeafGradient = leaf_gradient_of(leaf)
    state.dropped()
    leaf._local_tensor.grad = gradient
    if state.partial:
        state.assign_total()


def joint(captured: Captured, *args: Any, **kwargs: Any) -> Joint:
    """Trace forward, loss, backward and gradient sums of a captured step into one graph.

    Where the step is not recorded for such a call yet, it is called, which runs it. Tracing itself
    runs nothing. Collective, as the step is: call it on all ranks.

    Args:
        captured: by `capture`; it returns the loss, a scalar, alone or first of a tuple.
        *args: of a call of it; tensors among them require no grad.
        **kwargs: of the same call.

    Raises:
        CaptureError: what a graph of local tensors cannot hold: a backward or calls of other
            libraries inside of the step, arguments or plain tensors that require grad, hooks on
            parameters, `Partial("avg")` parameters, random draws on accelerators.

    Examples:
        step = capture(lambda x, y: cross_entropy(model(x), y))
        whole = joint(step, x, y)
        loss = whole(x, y)       # p.grad is set
        optimizer.step()
    """
    return joint_stored(captured, args, kwargs, ())


def joint_stored(
    captured: Captured,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stored: Sequence[ParameterStorage],
) -> Joint:
    """`joint` of a step some of whose parameters lie elsewhere, as shards: see `ParameterStorage`.

    The graph gathers what is stored and sums its gradients; `parameters` of the result are those of
    the step that are none of the stand-ins, and then what is stored.

    Args:
        captured: by `capture`.
        args: of a call of it.
        kwargs: of the same call.
        stored: the parameters; the same on all ranks, in one order.

    Raises:
        CaptureError: see `joint`.
    """
    if not isinstance(captured, Captured):
        raise CaptureError(f"joint: it takes what capture() returned, not a {type(captured)}")
    with _lent(stored):
        for _ in range(_TRIES):
            program, call = _program_for(captured, args, kwargs)
            made = _traced(captured, program, call, stored)
            # Tracing for the first time in a process loads parts of torch, which guards may see.
            fits = made is not None and program.stands_for(call) is not None
            if agreed(captured._layouts, fits) and made is not None:
                return made
        raise CaptureError(
            "joint: what the step reads changes whenever it is traced: "
            f"{program.why_not(call) or 'on another rank'}"
        )


@contextmanager
def _lent(stored: Sequence[ParameterStorage]) -> Iterator[None]:
    """Inside, the modules hold the stand-ins of all storages."""
    with ExitStack() as stack:
        for one in stored:
            stack.enter_context(one.lent())
        yield


def _traced(
    captured: Captured, program: Program, call: KeyedCall, stored: Sequence[ParameterStorage]
) -> Joint | None:
    """The joint graph of a program; None where that does not stand for the call any more."""
    locals_ = program.stands_for(call)
    if locals_ is None:
        return None
    names = _names(captured.function, program)
    arguments = program.arguments(call.flat, locals_)
    leaves, wanted = _wanted(program, arguments, names)
    loss, layout = _loss(program)
    sources = tuple(names.get(id(s.holder), s.name) for s in program.sources)
    places = tuple(_places(program, one) for one in stored)
    module = trace_joint(Step(program.module, sources, loss, layout, wanted, places), arguments)
    owed = tuple((leaf, one.owed) for leaf, one in zip(leaves, wanted, strict=True))
    gone = {id(leaf) for one in stored for leaf in one.stand_ins}
    held = {
        id(leaf): name for one in stored for name, leaf in zip(one.names, one.stored, strict=True)
    }
    for one in program.outputs.same():
        if id(one) in gone:
            raise CaptureError(
                f"joint: the step returns the parameter '{names.get(id(one), 'of a module')}' "
                "itself, of which it has a stand-in. Read it from its module after the step"
            )
    for source in program.sources:
        if id(source.holder) in held:
            raise CaptureError(
                f"joint: the step uses the stored parameter '{held[id(source.holder)]}' itself, "
                "and not what a module holds while it runs. Read it from its module inside"
            )
    pairs = [(leaf, one.name) for leaf, one in zip(leaves, wanted, strict=True)]
    kept = [pair for pair in pairs if id(pair[0]) not in gone]
    for one in stored:
        kept += zip(one.stored, one.names, strict=True)
        for name, leaf in zip(one.names, one.stored, strict=True):
            _check_leaf(name, leaf, leaf_gradient_of(leaf))
    parameters = tuple(name for _, name in kept)
    returned = tuple(range(len(kept)))
    kept_leaves = tuple(leaf for leaf, _ in kept)
    return Joint(module, parameters, module, program, kept_leaves, owed, returned, tuple(stored))


def _places(program: Program, storage: ParameterStorage) -> StoredPlaces:
    """Where the stand-ins of a storage are among the arguments of a program."""
    at = {id(source.holder): place for place, source in enumerate(program.sources)}
    groups: list[Group | None] = []
    for leaf in storage.stored:
        layout = leaf._spec.layout
        # As in eager mode, in which a gradient is unsummed wherever its parameter is replicated.
        leaf_gradient_of(leaf).note_use(layout.replicated)
        axes = axes_in(layout.replicated)
        groups.append(group_of(layout.mesh, axes) if axes else None)
    return StoredPlaces(
        storage,
        tuple(at.get(id(leaf)) for leaf in storage.stand_ins),
        tuple(leaf_gradient_of(leaf).partial for leaf in storage.stand_ins),
        tuple(storage.inputs()),
        tuple(groups),
    )


def _program_for(
    captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Program, KeyedCall]:
    for _ in range(_TRIES):
        call = KeyedCall(args, kwargs)
        fitting = (one for one in captured.programs if one.key == call.key)
        program = next((one for one in fitting if one.stands_for(call) is not None), None)
        # Ranks may differ in when they record, and a call communicates: all call, or none does. The
        # first call is made by all, which tells the meshes that have to agree.
        meshes = captured._layouts
        if meshes is not None and agreed(meshes, program is not None) and program is not None:
            return program, call
        captured(*args, **kwargs)
    why = captured.refusal or "each call of it was run, and none could be kept"
    raise CaptureError(f"joint: the step is not recorded: {why}")


def _names(function: Any, program: Program) -> dict[int, str]:
    """Names of parameters and buffers, by id: as the outermost module that took part has them."""
    modules = [function] if isinstance(function, nn.Module) else []
    names: dict[int, str] = {}
    for module in outermost_first([*modules, *program.modules]):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            names.setdefault(id(tensor), name)
    return names


def _wanted(
    program: Program, arguments: Sequence[Any], names: dict[int, str]
) -> tuple[tuple[DTensor, ...], tuple[GradientTarget, ...]]:
    """The parameters that get gradients.

    Raises:
        CaptureError: the step has what a joint graph cannot hold.
    """
    if program.live:
        raise CaptureError(
            "joint: the step calls other libraries as they are (a metric, a logger), which a graph "
            "of operators cannot hold. Call them outside"
        )
    if program.applies:
        raise CaptureError(
            "joint: a custom autograd.Function is given DTensors, and its backward runs on these. "
            "Call it by local_map(F.apply, ...), which gives it local tensors"
        )
    if any(_is_hook(node) for node in program.graph.nodes):
        raise CaptureError(
            "joint: the step registers a hook on an activation (register_hook, retain_grad), which "
            "would run in the backward, and a graph runs none. Leave it out"
        )
    if program.differentiates:
        raise CaptureError(
            "joint: a backward runs inside of the step. Capture the forward and the loss alone: "
            "the joint graph adds the backward, and sets gradients"
        )
    leaves: list[DTensor] = []
    wanted: list[GradientTarget] = []
    for place, (source, value) in enumerate(zip(program.sources, arguments, strict=True)):
        holder = source.holder
        if holder is None:
            _check_argument(value)
            continue
        if not holder.requires_grad:
            continue
        if not isinstance(holder, DTensor):
            raise CaptureError(
                "joint: the step uses a plain tensor that requires grad; distribute_tensor it"
            )
        state = leaf_gradient_of(holder)
        name = names.get(id(holder), f"parameter_{len(wanted)}")
        _check_leaf(name, holder, state)
        leaves.append(holder)
        wanted.append(GradientTarget(name, place, holder._spec.layout, state.partial))
    if not wanted:
        raise CaptureError("joint: the step uses no parameter that requires grad")
    return tuple(leaves), tuple(wanted)


def _is_hook(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", node.target)
    return name in ("register_hook", "hooked_node")


def _check_argument(value: Any) -> None:
    # No tensor: the gradient state of an argument that is a leaf.
    if not isinstance(value, Tensor) or value.requires_grad:
        raise CaptureError(
            "joint: an argument of the step requires grad; detach() it, or make it a parameter"
        )


def _check_leaf(name: str, leaf: DTensor, state: LeafGradient) -> None:
    local = leaf._local_tensor
    if state.average != 1:
        raise CaptureError(f"joint: parameter '{name}' is Partial('avg'); redistribute it")
    hooks = local._backward_hooks or getattr(local, "_post_accumulate_grad_hooks", None)
    if hooks:
        raise CaptureError(
            f"joint: parameter '{name}' has gradient hooks, which run in no graph (those of ZeRO "
            "and of an overlapped reduction are such). Take them off, or run the step with capture "
            "alone"
        )
    if getattr(local, "grad_dtype", local.dtype) is not local.dtype:
        raise CaptureError(
            f"joint: parameter '{name}' keeps its gradient in {local.grad_dtype} (grad_dtype), and "
            f"a graph makes it in {local.dtype}. Run the step with capture alone"
        )


def _loss(program: Program) -> tuple[int, Layout | None]:
    """The place of the loss among the results, and its layout; None where it is plain.

    Raises:
        CaptureError: the first output is no tensor of one element that the step makes.
    """
    found = program.outputs.first()
    if found is None or (found[1] is not None and prod(found[1].shape) != 1):
        raise CaptureError(
            "joint: the step returns its loss, a tensor of one element that it makes, alone or "
            "first of a tuple"
        )
    place, spec = found
    return place, None if spec is None else spec.layout
