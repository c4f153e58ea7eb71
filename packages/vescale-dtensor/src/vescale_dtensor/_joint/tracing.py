"""A captured program, its backward and the sums of its gradients, written down as one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_comm import Group, group_of
from vescale_comm.operators import arguments_of, effects_of

from vescale_dtensor._autograd.backward import start_of
from vescale_dtensor._autograd.uses import as_partial
from vescale_dtensor._capture.global_state import autocast_state, set_autocast
from vescale_dtensor._errors import CaptureError
from vescale_dtensor._joint.draws import draw_of, with_functional_draws
from vescale_dtensor._joint.labels import Label, LabelledRun, Labels
from vescale_dtensor._joint.storage import ParameterStorage
from vescale_dtensor._layout.layout import Layout, axes_in
from vescale_dtensor._redistribute.half_sums import reduce_over
from vescale_dtensor._torch.compat import set_grad_mode


@dataclass(frozen=True)
class GradientTarget:
    """A parameter whose gradient is wanted.

    Attributes:
        name: of it.
        place: of its local tensor among the arguments of the program.
        layout: its layout.
        owed: mask of the axes over which contributions to its gradient have to be added.
    """

    name: str
    place: int
    layout: Layout
    owed: int


@dataclass(frozen=True)
class StoredPlaces:
    """Where the stand-ins of a storage are.

    Attributes:
        storage: it.
        places: among the arguments of the program; None: it does not use that parameter.
        partial: for each, mask of the axes over which its gradient is partial.
        inputs: of the storage, as they are now.
        groups: for each, over which its shard of the gradient is summed as well; None: none.
    """

    storage: ParameterStorage
    places: tuple[int | None, ...]
    partial: tuple[int, ...]
    inputs: tuple[Tensor, ...]
    groups: tuple[Group | None, ...]


@dataclass(frozen=True)
class Step:
    """What is traced.

    Attributes:
        module: the program's graph.
        names: of its arguments.
        results: how many it returns.
        loss: the place of the loss among its results.
        loss_layout: None for a plain tensor.
        wanted: the parameters.
        stored: what is gathered.
    """

    module: fx.GraphModule
    names: tuple[str, ...]
    loss: int
    loss_layout: Layout | None
    wanted: tuple[GradientTarget, ...]
    stored: tuple[StoredPlaces, ...] = ()


def trace_joint(step: Step, arguments: Sequence[Any]) -> fx.GraphModule:
    """The joint graph: it takes the program's arguments, and returns its results and gradients.

    Behind the arguments it takes the inputs of each storage, in the place of their stand-ins.
    Gradients come after the results, in the order of `wanted` and then of storages; None for a
    parameter that the loss does not depend on. No two tensors that it returns share memory unless
    the program's did, or what is stored does.

    Raises:
        CaptureError: something that a graph cannot hold.
    """
    module, draws = with_functional_draws(step.module)
    labels = Labels()
    run = _differentiated(step, LabelledRun(module, labels), labels)
    grad, autocast = torch.is_grad_enabled(), autocast_state()
    try:
        # Fake: real tensors would run the step, draw, and write to buffers while it is traced.
        inputs = [one for each in step.stored for one in each.inputs]
        made = make_fx(run, tracing_mode="fake")(*arguments, *inputs)
    finally:
        set_grad_mode(grad)
        set_autocast(*autocast)
    graph = made.graph
    for node in graph.nodes:
        _check(node)
        name = draw_of(node)
        if name is not None:
            node.meta["draw"] = draws[name]  # which keeps it alive
    _describe_inputs(graph, step)
    _remove_unused(graph)
    describe_memory(graph)
    made.recompile()
    return made


def _differentiated(step: Step, forward: LabelledRun, labels: Labels) -> Callable[..., Any]:
    stand_ins = {place for each in step.stored for place in each.places if place is not None}
    own = [one for one in step.wanted if one.place not in stand_ins]

    def run(*given: Any) -> Any:
        flat = list(given[: len(step.names)])
        inputs = _gather(step, flat, given[len(step.names) :], labels)
        places = [one.place for one in step.wanted]
        for place in places:
            flat[place] = flat[place].detach().requires_grad_()
        with torch.enable_grad():
            results = list(forward.run(*flat))
        loss = results[step.loss]
        labels.enter(Label("backward", "backward"))
        start = None if step.loss_layout is None else start_of(step.loss_layout, loss)
        leaves = {place: flat[place] for place in places}
        arrived = torch.autograd.grad([loss], [*leaves.values()], [start], allow_unused=True)
        found = dict(zip(places, arrived, strict=True))
        labels.enter(None)
        with torch.no_grad():
            results = [one.detach() if isinstance(one, Tensor) else one for one in results]
            # What the caller gets back must not be what it passed in, nor twice the same memory.
            held = {_memory(one) for one in (*given, *results) if isinstance(one, Tensor)}
            totals: dict[str, Tensor | None] = {}
            # The last used first, on all ranks: about the order in which a backward has them.
            for one in reversed(own):
                labels.enter(Label("total", "gradient", parameter=one.name))
                gradient = found[one.place]
                if gradient is not None:
                    gradient = _total(one, leaves[one.place], gradient, held)
                totals[one.name] = gradient
            stored: list[Tensor | None] = []
            for each in reversed(step.stored):
                labels.enter(Label("total", "gradient", parameter=each.storage.names[0]))
                stored[:0] = _stored_totals(each, found, inputs[each.storage.name])
            labels.enter(None)
        return [*results, *(totals[one.name] for one in own), *stored]

    return run


def _gather(
    step: Step, flat: list[Any], given: Sequence[Tensor], labels: Labels
) -> dict[str, list[Tensor]]:
    """Put gathered values in the place of stand-ins; returns the inputs of each storage."""
    inputs, rest = {}, list(given)
    for each in step.stored:
        storage = each.storage
        count = len(each.inputs)
        inputs[storage.name], rest = rest[:count], rest[count:]
        if all(place is None for place in each.places):
            continue
        labels.enter(Label("forward", "gather", parameter=storage.names[0]))
        values = storage.gather(inputs[storage.name])
        for place, value in zip(each.places, values, strict=True):
            if place is not None:
                flat[place] = value
        labels.enter(None)
    return inputs


def _stored_totals(
    each: StoredPlaces, found: Mapping[int, Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """The complete gradients of what is stored, from those of its stand-ins."""
    contributions: list[Tensor | None] = []
    storage = each.storage
    for place, partial, leaf in zip(each.places, each.partial, storage.stand_ins, strict=True):
        gradient = None if place is None else found.get(place)
        if gradient is not None:
            layout = leaf._spec.layout
            gradient = as_partial(gradient, layout, partial, layout.replicated, leaf.shape)
        contributions.append(gradient)
    totals = []
    shards = storage.reduce(contributions, inputs)
    for shard, group in zip(shards, each.groups, strict=True):
        if shard is not None and group is not None:
            shard = reduce_over(shard, group)
        totals.append(shard)
    return totals


def _total(one: GradientTarget, leaf: Tensor, gradient: Tensor, held: set[int]) -> Tensor:
    """The complete gradient, as an accumulation into an empty `.grad` leaves it."""
    if one.owed:
        axes = axes_in(one.owed)
        gradient = reduce_over(gradient, group_of(one.layout.mesh, axes))
    if _memory(gradient) in held or gradient.stride() != leaf.stride():
        gradient = torch.empty_like(leaf).copy_(gradient)
    held.add(_memory(gradient))
    return gradient


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _check(node: fx.Node) -> None:
    """Refuse what would not replay: raw collectives, generators that no functional draw has.

    Raises:
        CaptureError: with the line that it comes from.
    """
    if node.op != "call_function":
        return
    label = node.meta.get("label")
    where = f" ({label.op} at {label.line or 'unknown'})" if isinstance(label, Label) else ""
    name = str(node.target)
    if name.startswith("c10d."):
        raise CaptureError(
            f"joint: {name}{where} is a collective that writes into memory, of which a graph keeps "
            "no order. Call the functions of vescale_comm, or of DTensors, in place of it"
        )
    values = [*node.args, *node.kwargs.values()]
    odd = [one for one in values if isinstance(one, fx.Node) and one.op == "get_attr"]
    owner = node.graph.owning_module
    if any(isinstance(getattr(owner, str(one.target), None), torch.Generator) for one in odd):
        raise CaptureError(
            f"joint: {name}{where} draws from a generator in a way that a graph cannot hold (a "
            "recomputed forward, or random numbers on an accelerator). Capture the forward with "
            "checkpoints off, on CPU"
        )


def _describe_inputs(graph: fx.Graph, step: Step) -> None:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    wanted = {one.place: one.name for one in step.wanted}
    stand_ins = {place for each in step.stored for place in each.places}
    count = len(step.names)
    for place, (node, name) in enumerate(zip(inputs[:count], step.names, strict=True)):
        node.meta["source"] = name
        if place in stand_ins:
            graph.erase_node(node)
        elif place in wanted:
            node.meta["parameter"] = wanted[place]
    rest = iter(inputs[count:])
    for each in step.stored:
        for at in range(len(each.inputs)):
            node = next(rest)
            node.meta["source"] = each.storage.name
            node.meta["stored"] = each.storage.name, at


def has_effect(node: fx.Node) -> bool:
    """Whether a node does something that no result shows: it draws, sends, or writes.

    Such a node stays, whoever uses it: another rank takes part in a collective, and a draw moves
    the stream of random numbers.
    """
    if node.op in ("placeholder", "output"):
        return True
    if not hasattr(node.target, "_schema"):
        return node.op != "get_attr" and node.is_impure()
    return bool(effects_of(node.target, arguments_of(node.target, node.args, node.kwargs)))


def _remove_unused(graph: fx.Graph) -> None:
    """Leave out what nothing needs, and the `detach` of what nobody differentiates any more."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):  # as newer versions trace it
            node.replace_all_uses_with(node.args[0])
    for node in reversed(list(graph.nodes)):
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def describe_memory(graph: fx.Graph) -> None:
    """Note bytes and aliasing: nodes with one number of `storage` share memory."""
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            number = numbers.setdefault(_memory(value), len(numbers))
            node.meta["storage"], node.meta["bytes"] = number, value.numel() * value.itemsize
