"""Activations of a step's graph that wait on the host for their backward.

What lives at the peak and is used again only behind it is copied to the host after its last use
before the peak, and back ahead of its first use behind it. The copies are nodes, of the very bytes,
so results keep their bits. Copies cost nothing while a step computes for longer than they take;
beyond that, a value that is cheaper to compute a second time may be (`recompute=True`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import torch
from torch import fx

from vescale_parallel._common.messages import human_bytes
from vescale_parallel._cost import Link
from vescale_parallel._errors import GraphError
from vescale_parallel._graph.budget import Bytes, bytes_of
from vescale_parallel._graph.collectives import is_wait, schema_name
from vescale_parallel._graph.host_ops import copy_kind, host_memory, operators
from vescale_parallel._graph.machine import Machine
from vescale_parallel._graph.recomputation import Choice, Chooser, repeat
from vescale_parallel._graph.rewrite import copied
from vescale_parallel._graph.timeline import computing_seconds
from vescale_parallel._graph.values import say_value
from vescale_parallel._memory.simulation import profile
from vescale_parallel._memory.tracing import Result, TracedGraph, Tracing, trace_program

aten: Any = torch.ops.aten
_ALIGNMENT: Final = 64
_ROUNDS: Final = 64
_PATIENCE: Final = 3  # rounds that win nothing
_MEMORY: Final = "_host_memory"
# Only their ratios matter, where no machine is given.
_MACHINE: Final = Machine(flops=1e12, memory_bandwidth=1e11, link=Link(latency=0.0, bandwidth=1e10))


@dataclass(frozen=True)
class Offloaded:
    """A graph of which some values wait on the host.

    Attributes:
        graph_module: it; it takes and returns what the given graph does, with the same bits.
        peak_before: bytes at the peak of the given graph, of what it makes on the device.
        peak: of this one.
        host_bytes: of the host's memory that it holds.
        moved: names of the nodes whose values wait on the host.
        recomputed: names of the nodes that repeat others.
        copying: seconds of all copies, as estimated.
        recomputing: seconds of the repeated nodes, as estimated.
    """

    graph_module: fx.GraphModule
    peak_before: int
    peak: int
    host_bytes: int
    moved: tuple[str, ...]
    recomputed: tuple[str, ...]
    copying: float
    recomputing: float

    def __str__(self) -> str:
        again = f", {len(self.recomputed)} operators run twice" if self.recomputed else ""
        return (
            f"{human_bytes(self.peak_before)} -> {human_bytes(self.peak)} on the device: "
            f"{len(self.moved)} values wait on the host ({human_bytes(self.host_bytes)}, copied in "
            f"about {self.copying * 1e3:.3f} ms){again}"
        )


@dataclass(frozen=True)
class _Move:
    """A storage that waits on the host.

    Attributes:
        storage: its index.
        bytes: its size.
        base: a node whose value is all of it.
        whole: how that lies.
        after, before: nodes behind the last use before the peak, and at the first one behind it.
        wanted: nodes that are read then, and where their values lie in the storage.
        seconds: of both copies.
        steps: of all nodes, when it was chosen.
    """

    storage: int
    bytes: int
    base: fx.Node
    whole: Result
    after: fx.Node
    before: fx.Node
    wanted: tuple[tuple[fx.Node, Result], ...]
    seconds: float
    steps: Mapping[fx.Node, int]


@dataclass
class _GraphEdits:
    """What the rounds have changed."""

    module: fx.GraphModule
    host_bytes: int = 0
    copying: float = 0.0
    moved: list[str] = field(default_factory=list)
    again: dict[str, float] = field(default_factory=dict)


def offload(
    graph: fx.GraphModule,
    memory_bytes: Bytes,
    *,
    inputs: Sequence[Any] | None = None,
    machine: Machine | None = None,
    recompute: bool = False,
) -> Offloaded:
    """Let a graph take no more memory of its device, by values that wait on the host.

    Not collective: copies are each rank's own, so ranks may choose differently.

    Args:
        graph: of a step, as `Joint.graph_module`, `train_step` or `make_fx` give it.
        memory_bytes: what its results and all that it makes may take at once on the device: a
            number, or text such as "24GiB".
        inputs: of the graph; None: what its placeholders say of themselves (`meta["val"]`).
        machine: whose rates tell what is cheap, and how early copies have to start; None: some.
        recompute: whether values may be computed a second time as well, where that is cheaper.

    Raises:
        GraphError: no choice of this kind takes so little; the message tells the least. Or
            `memory_bytes` says no number of bytes.
        MemoryPlanError: shapes depend on values.

    Examples:
        step = graph.train_step(model, loss_of_batch, words)
        made = graph.offload(step.graph_module, "24GiB", machine=graph.calibrate())
        step = step.running(made.graph_module)
    """
    goal = bytes_of("offload: memory_bytes", memory_bytes)
    if machine is None:
        machine = _MACHINE
    # First no more than has to be; what that wins may not be enough where all that can be is.
    found, tracing = [], Tracing()
    for at_once in (False, True):
        one = _attempt(graph, inputs, goal, machine, tracing, at_once=at_once, recompute=recompute)
        if one.peak <= goal:
            return one
        found.append(one)
    best = min(found, key=lambda one: one.peak)
    also = "" if recompute else ", ask for recompute=True as well"
    raise GraphError(
        f"offload: memory_bytes={goal:,}, but the graph takes {best.peak_before:,} bytes "
        f"as it is, and {best.peak:,} with {len(best.moved)} values ({best.host_bytes:,} bytes) on "
        f"the host, which is the least that was reached. Ask for that{also}, shard more, or let "
        "the batch be smaller."
    )


def _attempt(
    graph: fx.GraphModule,
    inputs: Sequence[Any] | None,
    goal: int,
    machine: Machine,
    tracing: Tracing,
    *,
    at_once: bool,
    recompute: bool,
) -> Offloaded:
    """Choose in rounds, each at the peak that the one before has left.

    `at_once`: choose all that there is at a peak, and not only as much as the goal asks for.
    """
    module = copied(graph, {})[0]
    # Behind what lies on the host already, of a graph that was offloaded before.
    held = dict(module.named_buffers()).get(_MEMORY)
    made = _GraphEdits(module, 0 if held is None else _aligned(held.numel()))
    peaks: list[int] = []
    while True:
        of = trace_program(made.module, inputs, memory=tracing)
        peaks.append(profile(of.program, range(len(of.program))).peak)
        stuck = len(peaks) > _PATIENCE and min(peaks[-_PATIENCE:]) >= min(peaks[:-_PATIENCE])
        chosen: list[_Move | Choice] = []
        if peaks[-1] > goal and not stuck and len(peaks) < _ROUNDS:
            chooser = _Cheapest(of, machine, made.copying, recompute=recompute)
            chosen = chooser.choose(0 if at_once else goal)
        if not chosen:
            break
        for one in chosen:
            if isinstance(one, _Move):
                _move(made, one)
            else:
                rates = machine.flops, machine.memory_bandwidth
                for node, source in repeat(made.module.graph, one, of):
                    made.again[node.name] = computing_seconds(source, *rates)
    # Within the peak that is there: a copy that starts early takes memory early.
    _start_early(of, max(goal, peaks[-1]), machine)
    made.module.graph.lint()
    made.module.recompile()
    of = trace_program(made.module, inputs, memory=tracing)
    return Offloaded(
        made.module,
        peaks[0],
        profile(of.program, range(len(of.program))).peak,
        made.host_bytes,
        tuple(made.moved),
        tuple(made.again),
        made.copying,
        sum(made.again.values()),
    )


class _Cheapest:
    """What to move, and what to compute again, of a graph in program order."""

    def __init__(
        self, of: TracedGraph, machine: Machine, copying: float, *, recompute: bool
    ) -> None:
        rates = machine.flops, machine.memory_bandwidth
        self.of, self.machine = of, machine
        self.again = Chooser(of, rates)
        self.recompute = recompute
        # Copies hide behind what is computed, as long as they take no longer.
        self.hidden = sum(computing_seconds(node, *rates) for node in of.nodes) - copying
        self.bases = _bases(of)

    def choose(self, memory_bytes: int) -> list[_Move | Choice]:
        """Return choices that bring the peak below, or all that there are at it."""
        again, peak = self.again, self.again.profile.step
        moves = {one.storage: one for one in self._moves(peak)}
        repeats = {one.storage: one for one in again.candidates(peak)} if self.recompute else {}
        left = again.profile.peak - memory_bytes
        chosen: list[_Move | Choice] = []
        storages = sorted(
            moves.keys() | repeats.keys(), key=lambda at: -self.of.program.storages[at].bytes
        )
        # The large ones first: a copy has its latency, too.
        for at in storages:
            if left <= 0 or at in again.needed:
                continue
            move = moves.get(at)
            # Asked again: what it would read may be gone by now.
            repeated = again.choice(at, peak) if at in repeats else None
            exposed = max(move.seconds - max(self.hidden, 0.0), 0.0) if move is not None else 0.0
            if repeated is not None and (move is None or repeated.seconds < exposed):
                chosen.append(repeated)
                again.needed |= repeated.reads
            elif move is not None:
                chosen.append(move)
                self.hidden -= move.seconds
            else:
                continue
            again.gone.add(at)
            left -= self.of.program.storages[at].bytes
        return chosen

    def _moves(self, peak: int) -> Iterator[_Move]:
        for at, storage in enumerate(self.of.program.storages):
            # It lives at the peak, and nobody needs it there.
            idle = storage.maker < peak < storage.users[-1] and peak not in storage.users
            if idle and storage.bytes and not storage.kept:
                found = self._move(at, peak)
                if found is not None:
                    yield found

    def _move(self, at: int, peak: int) -> _Move | None:
        of, storage = self.of, self.of.program.storages[at]
        last = max(one for one in storage.users if one < peak)
        first = min(one for one in storage.users if one > peak)
        base = self.bases.get(at)
        # The copy follows the last use before the peak, so all of the value has to be there by
        # then.
        if base is None or self.again.step[base] > last:
            return None
        whole = of.results[base][0]
        # What was copied is the value that is read, unless somebody has written since.
        if any(one > last for one in self.again.writes.get(whole.key, ())):
            return None
        wanted: dict[fx.Node, Result] = {}
        for user in (one for one in storage.users if one > peak):
            for node in of.nodes[user].all_input_nodes:
                if self.again.step.get(node, peak) >= peak:
                    continue
                lying = of.results[node]
                if not any(one.storage == at for one in lying):
                    continue
                # A view of another dtype could not be made of what comes back by its strides
                # alone.
                if len(lying) != 1 or lying[0].dtype != whole.dtype:
                    return None
                wanted[node] = lying[0]
        link = self.machine.host
        seconds = 2 * (link.latency + storage.bytes / link.bandwidth)
        nodes = of.nodes[last], of.nodes[first]
        wanted_of = tuple(wanted.items())
        steps = self.again.step
        return _Move(at, storage.bytes, base, whole, *nodes, wanted_of, seconds, steps)


def _bases(of: TracedGraph) -> dict[int, fx.Node]:
    """For each storage the first node whose value is all of it, in one dense tensor."""
    found: dict[int, fx.Node] = {}
    for node in of.nodes:
        lying = of.results[node]
        at = lying[0].storage if len(lying) == 1 else None
        # What is under way has no value yet.
        if at is None or at in found or (_communicates(node) and not is_wait(node)):
            continue
        one, storage = lying[0], of.program.storages[at]
        if _communicates(of.nodes[storage.maker]) and not is_wait(node):
            continue
        span = 1 + sum((n - 1) * step for n, step in zip(one.shape, one.stride, strict=True))
        count = torch.Size(one.shape).numel()
        dense = not one.offset and span == count
        if dense and count * one.dtype.itemsize == storage.bytes:
            found[at] = node
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _communicates(node: fx.Node) -> bool:
    return "c10d" in schema_name(node)


def _move(made: _GraphEdits, move: _Move) -> None:
    """Let a storage wait on the host."""
    ops, graph, offset, whole = operators(), made.module.graph, made.host_bytes, move.whole
    # At multiples of a cache line: copies of unaligned memory are slow, and some devices refuse
    # them.
    made.host_bytes = _aligned(offset + move.bytes)
    made.copying += move.seconds
    made.moved.append(move.base.name)
    memory = _memory_of(made, whole.device)
    shape, stride = list(whole.shape), list(whole.stride)
    with graph.inserting_after(move.after):
        token = graph.call_function(ops.host_write, (move.base, memory, offset))
    with graph.inserting_before(move.before):
        given = (token, memory, offset, shape, stride, whole.dtype)
        read = graph.call_function(ops.host_read, given)
        ready = graph.call_function(ops.host_ready, (read,))
        again = {node: _as_it_lay(graph, ready, one, whole) for node, one in move.wanted}
    for name in move.base.meta.keys() & {"label", "again"}:
        for new in (token, read, ready):
            new.meta[name] = move.base.meta[name]
    # Who comes later reads what came back; nodes that were put there since have no step.
    since = move.steps[move.before]
    for node, new in again.items():
        for user in list(node.users):
            if move.steps.get(user, -1) >= since:
                user.replace_input_with(node, new)
    _say_values(move.base, [token, read, ready, *again.values()])


def _as_it_lay(graph: fx.Graph, ready: fx.Node, one: Result, whole: Result) -> fx.Node:
    """A node whose value lies in what came back as it lay in the storage."""
    where = (one.shape, one.stride, one.offset)
    if where == (whole.shape, whole.stride, whole.offset):
        return ready
    shape, stride, offset = where
    return graph.call_function(aten.as_strided.default, (ready, list(shape), list(stride), offset))


def _say_values(base: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Let nodes say what they make: later passes, and memory plans, read it from there."""
    mode = getattr(base.meta.get("val"), "fake_mode", None)
    if mode is None:
        return
    memory: Any = nodes[0].args[1]
    size = memory.graph.owning_module.get_buffer(_MEMORY).shape
    with mode:
        memory.meta["val"] = torch.empty(size, dtype=torch.uint8, device="cpu")
    for node in dict.fromkeys(nodes):
        say_value(node, mode)


def _memory_of(made: _GraphEdits, device: torch.device) -> fx.Node:
    """The node of the host's memory, now as large as it has to be."""
    module = made.module
    # Not written to while graphs are made: memory that is not touched is not taken.
    # Made anew with each value that moves, as its size is known at the end only.
    module.register_buffer(_MEMORY, host_memory(made.host_bytes, device), persistent=False)
    found = next((n for n in module.graph.nodes if n.target == _MEMORY), None)
    if found is None:
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            found = module.graph.get_attr(_MEMORY)
    return found


def _start_early(of: TracedGraph, goal: int, machine: Machine) -> None:
    """Start copies to the device as early as they take, where their memory is free by then."""
    nodes = list(of.nodes)
    # What lives at each step. A copy that starts early lives from there on, and is added below.
    during = list(profile(of.program, range(len(of.program))).during)
    rates = machine.flops, machine.memory_bandwidth
    times = [0.0 if copy_kind(one) else computing_seconds(one, *rates) for one in nodes]
    starts = [0.0, *accumulate(times)]
    step = {node: at for at, node in enumerate(nodes)}
    free = starts[-1]
    reads = [one for one in nodes if copy_kind(one) == "to_device"]
    # From the last: each has to be done when it is used, and when the next one begins.
    for read in reversed(reads):
        at, token = step[read], read.args[0]
        size = sum(s.bytes for s in of.program.storages if s.maker == at)
        took = machine.host.latency + size / machine.host.bandwidth
        free = min(free, starts[at]) - took
        to = at
        while (
            # Never before it has left the device; never before the stream is free; never above
            # the goal.
            to > step[token] + 1  # type: ignore[index]
            and starts[to] > free
            and during[to - 1] + size <= goal
        ):
            to -= 1
        if to < at:
            for one in range(to, at):
                during[one] += size
            nodes[to].prepend(read)
