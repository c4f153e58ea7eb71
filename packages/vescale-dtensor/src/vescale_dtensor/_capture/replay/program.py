"""A program: what one run of a function did on local tensors, with the guards of its replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from vescale_dtensor._capture.guard.call_key import KeyedCall, difference
from vescale_dtensor._capture.guard.free_tensors import FreeTensors, Outsiders
from vescale_dtensor._capture.guard.global_state import autocast_state, set_autocast
from vescale_dtensor._capture.guard.module_guards import ModuleGuard
from vescale_dtensor._capture.guard.state_guard import StateGuard
from vescale_dtensor._capture.record.generated_code import compilable, pin
from vescale_dtensor._capture.record.graph import InputSource, TracedGraph
from vescale_dtensor._capture.record.outputs import Outputs
from vescale_dtensor._capture.record.passes import differentiates, graph_module, is_free_local
from vescale_dtensor._capture.replay.leaf_uses import LeafUses
from vescale_dtensor._capture.replay.listing import listing
from vescale_dtensor._dispatch.execute import after_mutation
from vescale_dtensor._tensor.copied_views import check_writable
from vescale_dtensor._torch.compat import set_grad_mode

Transform = Callable[[fx.GraphModule], Callable[..., Any]]


@dataclass(frozen=True)
class Parts:
    """What a recording found out.

    Attributes:
        key: of the call, see `KeyedCall`.
        trace: the finished graph.
        outputs: what to return.
        modules: those that took part.
        gradients: whether the state of gradients at the beginning matters.
        modes: whether grad mode or autocast change on the way.
        outsiders: what code could ask of tensors that are no arguments of the program.
        state: what code could read of Python state.
    """

    key: tuple[Any, ...]
    trace: TracedGraph
    outputs: Outputs
    modules: ModuleGuard
    gradients: bool
    modes: bool
    outsiders: Outsiders
    state: StateGuard


class Program:
    """One recorded run: a graph of local torch calls and collectives, and its guards.

    Attributes:
        graph: a `torch.fx.Graph` on plain local tensors.
        sources: where each of its arguments comes from.
        key: what a call must look like.
        free: the tensors from outside.
        has_gradients: whether it reads gradients, adds to them or writes to them.
        carries_history: whether it gives an argument that it writes to an autograd history.
        uncompared: why its replays are not compared with the function, in words; None if they are,
            or nobody has asked for it.
    """

    def __init__(self, parts: Parts, transform: Transform | None) -> None:
        trace = parts.trace  # which is not kept: it knows every tensor that there was
        self.key = parts.key
        # Before the passes: the nodes that it makes superfluous are dead code to them.
        self._leaves = LeafUses(trace)
        self._module = graph_module(trace)
        self.graph: fx.Graph = self._module.graph
        pin(self._module)
        self._run = self._module.forward if transform is None else transform(self.graph_module)
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.sources: tuple[InputSource, ...] = tuple(trace.sources[n] for n in inputs)
        self._fetches = [s.fetch for s in self.sources if not is_free_local(s)]
        free = ((s.holder, *s.states) for s in self.sources if s.holder is not None)
        self.free = FreeTensors(free, parts.gradients, trace.dropped_gradients)
        # Asked now, while the trace knows the tensors: by version, so whatever wrote to them.
        self._written = [trace.sources[n] for n in inputs if trace.was_written(n)]
        self.carries_history = any([trace.has_new_history(n) for n in inputs])
        self.uncompared: str | None = None
        self._outputs, self._modules = parts.outputs, parts.modules
        self._changes_modes, self._state = parts.modes, parts.state
        self.has_gradients = parts.gradients
        self._outsiders = parts.outsiders
        self._outsiders.leave_to(s.holder for s in self.sources if s.holder is not None)

    @cached_property
    def graph_module(self) -> fx.GraphModule:
        """The graph as a module, to compile, look at or change; `arguments` are its arguments."""
        return compilable(self._module)

    def explain(self) -> str:
        """A listing: each step, its result's layout, the op it came from, bytes sent."""
        why = self.uncompared
        note = "" if why is None else f"\nnot compared with the function: {why}"
        return listing(self.graph) + note

    def __repr__(self) -> str:
        return f"Program({len(self.graph.nodes)} nodes, {len(self.sources)} arguments)"

    def stands_for(self, call: KeyedCall) -> list[Tensor] | None:
        """The local tensors that the program holds, if it may run for a call of its key; else None.

        The caller compares the keys.
        """
        # The cheapest first. The state comes last, since it takes longest.
        locals_ = self.free.matching_locals()
        if (
            locals_ is None
            or not self._outsiders.hold(call)
            or not self._modules.holds()
            # Notes uses, even where the state then differs. That is sound: a use noted in excess
            # costs a mask in backward, one that is missing makes the gradient wrong.
            or not self._leaves.note_free_leaves(locals_)
        ):
            return None
        return locals_ if self._state.holds() else None

    def why_not(self, call: KeyedCall) -> str | None:
        """What of a call is not as it was when the program was recorded, in words."""
        found = difference(self.key, call.key)
        if found is not None:
            return found
        if self.free.matching_locals() is None or not self._outsiders.hold(call):
            return "the layout, or the gradient, of a tensor from outside"
        if not self._modules.holds():
            return "the mode, the hooks or the parts of a module"
        place = self._state.difference()
        return None if place is None else str(place)

    def arguments(self, flat: list[Any], locals_: list[Tensor] | None = None) -> list[Any]:
        """What `graph_module` is called with, for a call with these flat arguments."""
        if locals_ is None:
            locals_ = [w._local_tensor for w in self.free.wrappers]
        return [*[fetch(flat) for fetch in self._fetches], *locals_]

    def replay(
        self, flat: list[Any], locals_: list[Tensor] | None = None, *, apart: bool = False
    ) -> Any:
        """Run the program for a call that it stands for.

        `apart`: its graph does not mind later writes to what it writes to and saves for backward.
        """
        # Before the steps, as in eager mode: a use may retype a gradient that the steps read.
        self._leaves.note_arguments(flat)
        arguments = self.arguments(flat, locals_)
        if apart and self._written:
            own = {id(getattr(one, "_local_tensor", one)) for one in self.written(flat)}
            # The same memory, with a version counter of its own.
            arguments = [one.data if id(one) in own else one for one in arguments]
        if self._written:
            self.before_writes(flat)
        run = self._run_in_modes if self._changes_modes else self._run
        results = run(*arguments)
        if self._written:
            self.after_writes(flat)
        return self._outputs(flat, results)

    def before_writes(self, flat: list[Any]) -> None:
        """Ask whether the tensors that the steps write to may be written to.

        All of them before the first step, so that a refusal has written nothing.
        """
        for wrapper in self.written(flat):
            check_writable(wrapper, "a captured function")

    def after_writes(self, flat: list[Any]) -> None:
        """Tell the wrappers that the steps wrote to their local tensors."""
        for wrapper in self.written(flat):
            after_mutation(wrapper)

    @property
    def module(self) -> fx.GraphModule:
        """The steps, as they are run: a part of the program, not to be changed."""
        return self._module

    @property
    def outputs(self) -> Outputs:
        """How the outputs of a call are made of the results of the steps."""
        return self._outputs

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that took part."""
        return self._modules.modules

    def _run_in_modes(self, *arguments: Any) -> Any:
        """Run the steps, and restore the modes of the caller even if a step fails."""
        grad, autocast = torch.is_grad_enabled(), autocast_state()
        try:
            return self._run(*arguments)
        finally:  # the program ends in the modes in which it began, unless a step failed
            set_grad_mode(grad)
            set_autocast(*autocast)

    @cached_property
    def differentiates(self) -> bool:
        """Whether a backward runs inside."""
        return any(map(differentiates, self.graph.nodes))

    @cached_property
    def generators(self) -> list[torch.Generator]:
        """The generators that steps draw from, but for the default ones."""
        held = [value for module in self._module.modules() for value in vars(module).values()]
        return [value for value in held if isinstance(value, torch.Generator)]

    def written(self, flat: list[Any]) -> list[Any]:
        """The tensors from outside that the program writes to."""
        return [s.holder if s.index is None else flat[s.index] for s in self._written]
