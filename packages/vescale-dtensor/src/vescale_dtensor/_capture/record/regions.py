"""Regions that backward computes again: torch's activation checkpointing, also in a recording.

A recording runs the region as torch does, and marks where its steps begin and end. Of these,
`fold_regions` makes one step of the program, which replays run under `checkpoint` again: what it
makes on its way is freed, and made anew in backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from vescale_dtensor._capture.guard.global_state import GlobalState, global_state
from vescale_dtensor._capture.nesting import is_inside, running_inside
from vescale_dtensor._capture.record.generated_code import pin
from vescale_dtensor._capture.record.graph import TracedGraph
from vescale_dtensor._capture.record.surroundings import ProgramModes, Surroundings
from vescale_dtensor._capture.record.unsupported import refusal, user_line
from vescale_dtensor._dispatch.plain_operands import uncompared
from vescale_dtensor._torch.compat import dispatch_modes, is_traced

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

_STEPS = frozenset({"call_function", "call_method"})


class Steps(Protocol):
    """What of a recorder is needed here; see `Recorder`."""

    trace: TracedGraph
    modes: ProgramModes


class Regions:
    """The regions of one recording.

    Args:
        recorder: it.
        surroundings: of its steps, which the hooks of a region are a part of.

    Attributes:
        paused: whether calls are a part of torch's checkpointing, or of a recomputation, and no
            steps.
        modes: how many dispatch modes are the regions' own.
    """

    def __init__(self, recorder: Steps, surroundings: Surroundings) -> None:
        self._recorder, self._surroundings = recorder, surroundings
        self.paused = False
        self.modes = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The block in which the function runs."""
        token = _now.set(self)
        try:
            yield
        finally:
            _now.reset(token)

    @contextmanager
    def pausing(self, paused: bool = True) -> Iterator[None]:
        """Record nothing in the block, or record again."""
        before, self.paused = self.paused, paused
        try:
            yield
        finally:
            self.paused = before

    @contextmanager
    def inside(self, contexts: Contexts) -> Iterator[None]:
        """The steps of a region."""
        graph, modes = self._recorder.trace.graph, self.modes
        # A region is computed again in the modes in which it begins, and must leave no others.
        self._recorder.modes.follow(GlobalState(*global_state()), True)
        begin = graph.call_function(_begin, (self._recorder.trace.constant(contexts, False),))
        begin.meta["effect"], begin.meta["line"] = True, user_line()
        self.modes = dispatch_modes()
        try:
            with self.pausing(False), self._surroundings.in_region():
                yield
        finally:
            self.modes = modes
        self._recorder.modes.follow(GlobalState(*global_state()), True)
        graph.call_function(_end).meta["effect"] = True


_now: ContextVar[Regions | None] = ContextVar("vescale_dtensor_regions", default=None)


def _begin(contexts: Contexts) -> None:
    """Mark where a region begins; no step of a finished program."""


def _end() -> None:
    """Mark where it ends."""


def checkpoint(
    function: Callable[..., Any], *args: Any, context_fn: Contexts = noop_context_fn, **kwargs: Any
) -> Any:
    """Call a function, and free what autograd saves of it: backward calls it again.

    As `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, whose random numbers it draws
    again, too; and `capture` records it: replays compute the region again in backward, with the
    bits and the memory of eager mode.

    Args:
        function: it does the same in each call. In a recording, it must not write to tensors that
            it did not make.
        args: for it; tensors among these are kept until backward.
        context_fn: gives a context for the call and one for the calls in backward. Replays ask it
            anew, so it must hold nothing of one call.
        kwargs: for the function.

    Returns:
        What the function returns.
    """
    regions = _now.get()
    if not torch.is_grad_enabled() or (regions is None and not is_inside()):
        return torch_checkpoint(
            function, *args, use_reentrant=False, context_fn=context_fn, **kwargs
        )
    first = [regions]

    def run(*args: Any, **kwargs: Any) -> Any:
        if not first:
            with _again():
                return function(*args, **kwargs)
        regions = first.pop()  # which knows the recording: no longer than that
        if regions is None:
            return function(*args, **kwargs)
        with regions.inside(context_fn):
            return function(*args, **kwargs)

    if regions is None:
        return torch_checkpoint(run, *args, use_reentrant=False, context_fn=context_fn, **kwargs)
    with regions.pausing():
        return torch_checkpoint(run, *args, use_reentrant=False, context_fn=context_fn, **kwargs)


@contextmanager
def _again() -> Iterator[None]:
    """The block of a recomputation: other ranks may replay the call that it belongs to."""
    regions = _now.get()
    with uncompared(), running_inside():
        if regions is None:
            yield
            return
        with regions.pausing():  # backward is a step of the recording, and this a part of it
            yield


# --- finished programs


def replay_region(region: fx.GraphModule, contexts: Contexts, *values: Any) -> Any:
    """Run the steps of a region, and again in backward; a step of programs.

    Args:
        region: the steps, of which it returns those results that later steps need.
        contexts: see `checkpoint`.
        values: what the steps are given.
    """
    forward = region.forward
    if is_traced() or not torch.is_grad_enabled():
        return forward(*values)
    # torch hands on detached tensors, and the use of a parameter is noted by the very tensor.
    given = [
        index
        for index, one in enumerate(values)
        if isinstance(one, Tensor) and not (one.is_leaf and one.requires_grad)
    ]
    made = [not values[index].is_leaf for index in given]
    # Held without those that torch holds, which notices when they are written to.
    held = [None if index in given else one for index, one in enumerate(values)]
    calls = [0]

    def run(_: Tensor, *tensors: Tensor) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            return forward(*_filled(held, given, tensors))
        # What is handed on is a leaf. Results, as they were, may be written to.
        pairs = zip(tensors, made, strict=True)
        tensors = tuple(one.view(one.shape) if inner else one for one, inner in pairs)
        with uncompared(), running_inside():
            return forward(*_filled(held, given, tensors))

    device = next((one.device for one in values if isinstance(one, Tensor)), None)
    here = torch.empty(0, device=device)  # torch asks arguments for the device
    rest = [values[index] for index in given]
    return torch_checkpoint(run, here, *rest, use_reentrant=False, context_fn=contexts)


def _filled(held: Sequence[Any], given: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    found = list(held)
    for index, tensor in zip(given, tensors, strict=True):
        found[index] = tensor
    return found


def has_regions(graph: fx.Graph) -> bool:
    """Whether a recording has regions that are not folded yet."""
    return any([node.target is _begin for node in graph.nodes])


def every_node(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph, with those of its regions after the step that they are."""
    for node in graph.nodes:
        yield node
        if node.target is replay_region:
            yield from every_node(node.meta["region"])


def fold_regions(trace: TracedGraph) -> None:
    """Make one step of each region.

    Raises:
        CaptureError: computing it again would do something a second time.
    """
    begun: list[fx.Node] = []
    for node in list(trace.graph.nodes):
        if node.target is _begin:
            begun.append(node)
        elif node.target is _end:
            _fold(begun.pop(), node, trace)


def _fold(begin: fx.Node, end: fx.Node, trace: TracedGraph) -> None:
    steps = _steps_between(begin, end)
    _check_again(steps, begin.meta["line"])
    within = set(steps)
    # In order, each once.
    inputs = list(dict.fromkeys(i for n in steps for i in n.all_input_nodes if i not in within))
    outputs = [node for node in steps if not within.issuperset(node.users)]
    region = _module_of(steps, inputs, outputs, trace)
    name = f"region_{len(trace.constants)}"
    trace.constants[name] = region
    values = [node for node in inputs if node.op != "get_attr"]
    graph = trace.graph
    with graph.inserting_before(end):
        given = (graph.get_attr(name), begin.args[0], *values)
        step = graph.create_node("call_function", replay_region, name="region")
        step.args = given
        step.meta |= {"effect": True, "region": region.graph, "line": begin.meta["line"]}
        for index, node in enumerate(outputs):
            part = graph.call_function(operator.getitem, (step, index))
            part.meta |= {k: v for k, v in node.meta.items() if k != "records"}
            node.replace_all_uses_with(part, lambda user: user not in within)
    for node in (*reversed(steps), begin, end):
        graph.erase_node(node)
    for node in inputs:
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


def _steps_between(begin: fx.Node, end: fx.Node) -> list[fx.Node]:
    """The steps of a region: arguments and constants may be those of later ones, too."""
    found, node = [], begin.next
    while node is not end:
        if node.op in _STEPS:
            found.append(node)
        node = node.next
    return found


def _check_again(steps: Sequence[fx.Node], line: str) -> None:
    """Refuse what must not be done twice."""
    made = {node.meta["memory"][0] for node in steps if "memory" in node.meta}
    given = {
        one.meta["memory"][0]
        for node in steps
        for one in node.all_input_nodes
        if "memory" in one.meta and one not in steps
    }
    for node in steps:
        outside = [memory for memory in node.meta.get("writes", ()) if memory not in made - given]
        if outside:
            raise refusal(
                f"a region that backward computes again ({line}) writes to a tensor that it has "
                f"not made, by {node.meta.get('op', node.name)}, and would a second time. Leave "
                "what writes (running statistics, counters) out of the region"
            )


def _module_of(
    steps: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    trace: TracedGraph,
) -> fx.GraphModule:
    """The steps as a module of their own."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        if node.op != "get_attr":
            copies[node] = graph.placeholder(node.name)
    for node in inputs:
        if node.op == "get_attr":
            copies[node] = graph.get_attr(str(node.target))
    for node in steps:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    names = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
    module = fx.GraphModule({name: trace.constants[name] for name in names}, graph, "Region")
    pin(module)
    return module
