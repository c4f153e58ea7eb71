"""A program: what one run of a function did on local tensors, and when it may stand for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from vescale_dtensor._capture._ambient import autocast_state, set_autocast
from vescale_dtensor._capture._entry import Entry
from vescale_dtensor._capture._explain import listing
from vescale_dtensor._capture._held import Held
from vescale_dtensor._capture._leaves import LeafUses
from vescale_dtensor._capture._modules import ModuleGuard
from vescale_dtensor._capture._outputs import Outputs
from vescale_dtensor._capture._trace import Source, Trace
from vescale_dtensor._copies import check_writable
from vescale_dtensor._execute import written
from vescale_dtensor._faces import Owed, make_hub, settles_nothing, straight
from vescale_dtensor._gradients import hooked_node
from vescale_dtensor._layout import Layout, Spec
from vescale_dtensor._one_step import unseen_by_modes
from vescale_dtensor._tensor import DTensor
from vescale_dtensor._torch_compat import set_grad_mode

_HUB, _HOOKED = unseen_by_modes(make_hub), unseen_by_modes(hooked_node)

Transform = Callable[[fx.GraphModule], Callable[..., Any]]
Place = tuple[Callable[[], Any], Tensor]
"""How to look at a place, and the tensor that was there."""


@dataclass(frozen=True)
class Parts:
    """What a recording found out.

    Attributes:
        key: of the call, see `Entry`.
        trace: the finished graph.
        outputs: what to return.
        modules: those that took part.
        gradients: whether the state of gradients at the beginning matters.
        modes: whether grad mode or autocast change on the way.
        places: where held tensors were found.
    """

    key: tuple[Any, ...]
    trace: Trace
    outputs: Outputs
    modules: ModuleGuard
    gradients: bool
    modes: bool
    places: tuple[Place, ...]


class Program:
    """One recorded run: a graph of local torch calls and collectives, and its guards.

    Attributes:
        graph_module: a `torch.fx.GraphModule` of plain local tensors; compile it, look at it,
            change it. `arguments` are what it is called with.
        sources: where each of its arguments comes from.
        key: what a call must look like.
        held: the tensors from outside.
    """

    def __init__(self, parts: Parts, transform: Transform | None) -> None:
        trace = parts.trace  # which is not kept: it knows every tensor that there was
        self.key = parts.key
        self._leaves = LeafUses(trace)
        self.graph_module = _graph_module(trace)
        self._run = self.graph_module.forward if transform is None else transform(self.graph_module)
        inputs = [n for n in trace.graph.nodes if n.op == "placeholder"]
        self.sources: tuple[Source, ...] = tuple(trace.sources[n] for n in inputs)
        self._fetches = [s.fetch for s in self.sources if not _is_held_local(s)]
        held = ((s.holder, *s.states) for s in self.sources if s.holder is not None)
        self.held = Held(held, parts.gradients)
        self._written = [trace.sources[n] for n in inputs if trace.was_written(n)]
        self._outputs, self._modules = parts.outputs, parts.modules
        self._changes_modes, self._places = parts.modes, parts.places

    @property
    def graph(self) -> fx.Graph:
        """The graph of `graph_module`."""
        return self.graph_module.graph

    def explain(self) -> str:
        """A listing: each step, its result's layout, the op it came from, bytes sent."""
        return listing(self.graph)

    def __repr__(self) -> str:
        return f"Program({len(self.graph.nodes)} nodes, {len(self.sources)} arguments)"

    def stands_for(self, call: Entry) -> list[Tensor] | None:
        """The local tensors that the program holds, if it may run for a call; else None."""
        if self.key != call.key:
            return None
        locals_ = self.held.locals_alike()
        if locals_ is None or not self._modules.holds() or not self._leaves.hold(locals_):
            return None
        if self._places and not all(look() is tensor for look, tensor in self._places):
            return None
        return locals_

    def arguments(self, flat: list[Any], locals_: list[Tensor] | None = None) -> list[Any]:
        """What `graph_module` is called with, for a call with these flat arguments."""
        if locals_ is None:
            locals_ = [w._local_tensor for w in self.held.wrappers]
        return [*[fetch(flat) for fetch in self._fetches], *locals_]

    def replay(self, flat: list[Any], locals_: list[Tensor] | None = None) -> Any:
        """Run the program for a call that it stands for."""
        self._leaves.note(flat)
        arguments = self.arguments(flat, locals_)
        if self._written:
            for wrapper in self.written(flat):
                check_writable(wrapper, "a captured function")
        run = self._run_in_modes if self._changes_modes else self._run
        results = run(*arguments)
        for wrapper in self.written(flat) if self._written else ():
            written(wrapper)
        return self._outputs(flat, results)

    def _run_in_modes(self, *arguments: Any) -> Any:
        grad, autocast = torch.is_grad_enabled(), autocast_state()
        try:
            return self._run(*arguments)
        finally:  # the program ends in the modes in which it began, unless a step failed
            set_grad_mode(grad)
            set_autocast(*autocast)

    def layouts(self) -> list[Layout]:
        """One layout for each mesh that tensors of the program lie on, the same on all ranks."""
        specs = [wrapper._spec for wrapper in self.held.wrappers]
        specs += [k[0] for k in self.key[1] if type(k[0]) is Spec]
        found = {id(spec.layout.mesh): spec.layout for spec in specs}
        return list(found.values())

    def written(self, flat: list[Any]) -> list[Any]:
        """The tensors from outside that the program writes to."""
        return [s.holder if s.index is None else flat[s.index] for s in self._written]


def _is_held_local(source: Source) -> bool:
    return isinstance(source.holder, DTensor)


def _graph_module(trace: Trace) -> fx.GraphModule:
    graph = trace.graph
    _remove_dead_code(trace)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    last = inputs[-1:]
    for node in inputs[:-1]:
        if _is_held_local(trace.sources[node]):
            last[0].append(node)  # these come last, in one go
            last = [node]
    graph.lint()
    names = [str(n.target) for n in graph.nodes if n.op == "get_attr"]
    return fx.GraphModule({name: trace.constants[name] for name in names}, graph, "Program")


def _remove_dead_code(trace: Trace) -> None:
    """Drop steps whose results nobody uses, and that have no effect; then unused arguments."""
    graph = trace.graph
    hooked = any(node.target is _HOOKED for node in graph.nodes)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op != "output" and not node.meta.get("effect"):
            graph.erase_node(node)
        elif node.target is _HUB and not hooked:  # a hook counts on all faces of its hub
            owed = trace.constants[str(node.args[3].target)]
            assert isinstance(owed, Owed)
            _keep_used_faces(node, owed)


def _keep_used_faces(hub: fx.Node, owed: Owed) -> None:
    """Let a hub make the faces that are used, and no others; and be none where it need not be."""
    source, data, masks, owed_node, shape = hub.args
    assert isinstance(masks, tuple)
    used = sorted({user.args[1] for user in hub.users})  # type: ignore[type-var]
    for user in list(hub.users):
        user.args = (hub, used.index(user.args[1]))
    masks = tuple(masks[i] for i in used)  # type: ignore[index]
    hub.args = (source, data, masks, owed_node, shape)
    if settles_nothing(masks, owed, shape):  # type: ignore[arg-type]
        (face,) = hub.users
        with hub.graph.inserting_before(hub):
            direct = hub.graph.call_function(straight, (source, data))
        direct.meta.update(face.meta)
        face.replace_all_uses_with(direct)
        hub.graph.erase_node(face)
        hub.graph.erase_node(hub)
