"""Activations of a step's graph computed a second time, so that they need not live across its peak.

What lives at the peak and is used again only behind it is a candidate, if operators that compute
and do nothing else make it again from what is there anyway: values that live on, inputs, constants.
The cheapest per byte are chosen, until the graph takes no more than it may. What is drawn at random
or sent is never repeated: masks stay, and random streams and collectives are those of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import fx

from vescale_parallel._common.messages import human_bytes
from vescale_parallel._errors import GraphError
from vescale_parallel._graph.budget import Bytes, bytes_of
from vescale_parallel._graph.machine import Machine
from vescale_parallel._graph.rewrite import copied
from vescale_parallel._graph.timeline import computing_seconds
from vescale_parallel._memory.simulation import profile
from vescale_parallel._memory.tracing import TracedGraph, Tracing, trace_program

_LONGEST: Final = 64  # operators that are repeated for one value, at most
_ROUNDS: Final = 64
_PATIENCE: Final = 3  # rounds that win nothing: what is repeated lives as well
# Only their ratio matters, where no machine is given: a processor does some ten operations in the
# time of a byte.
_FLOPS, _BANDWIDTH = 1e12, 1e11


@dataclass(frozen=True)
class Recomputed:
    """A graph in which some values are computed twice.

    Attributes:
        graph_module: it; it takes and returns what the given graph does, with the same bits.
        peak_before: bytes at the peak of the given graph, of what it makes.
        peak: of this one.
        nodes: names of the nodes that repeat others.
        seconds: that they take, as estimated.
    """

    graph_module: fx.GraphModule
    peak_before: int
    peak: int
    nodes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return (
            f"{human_bytes(self.peak_before)} -> {human_bytes(self.peak)}: {len(self.nodes)} "
            f"operators run twice, about {self.seconds * 1e3:.3f} ms"
        )


@dataclass(frozen=True)
class Choice:
    """A storage that is made again: which of its nodes, by which repeated ones, in front of whom.

    `reads` are storages that live on, and have to, as the repeated operators read them.
    """

    storage: int
    bytes: int
    nodes: tuple[fx.Node, ...]
    before: fx.Node
    reads: frozenset[int]
    seconds: float


def recompute(
    graph: fx.GraphModule,
    memory_bytes: Bytes,
    *,
    inputs: Sequence[Any] | None = None,
    machine: Machine | None = None,
) -> Recomputed:
    """Let a graph take no more memory, by computing values a second time where they are used.

    Not collective: nothing that is sent is repeated, so ranks may choose differently.

    Args:
        graph: of a step, as `Joint.graph_module`, `train_step` or `make_fx` give it.
        memory_bytes: what its results and all that it makes may take at once: a number, or text
            such as "24GiB".
        inputs: of the graph; None: what its placeholders say of themselves (`meta["val"]`).
        machine: whose rates tell what is cheap; None: some processor.

    Raises:
        GraphError: no choice of this kind takes so little; the message tells the least. Or
            `memory_bytes` says no number of bytes.
        MemoryPlanError: shapes depend on values.

    Examples:
        step = graph.train_step(model, loss_of_batch, words)
        made = graph.recompute(step.graph_module, "24GiB")
        step = step.running(made.graph_module)
    """
    goal = bytes_of("recompute: memory_bytes", memory_bytes)
    rates = (_FLOPS, _BANDWIDTH) if machine is None else (machine.flops, machine.memory_bandwidth)
    # First no more than has to be; what that wins may not be enough where all that can be is.
    tracing = Tracing()
    found = []
    for at_once in (False, True):
        one = _attempt(graph, inputs, goal, at_once, rates, tracing)
        if one.peak <= goal:
            return one
        found.append(one)
    raise GraphError(
        f"recompute: memory_bytes={goal:,}, but the graph takes {found[0].peak_before:,} "
        f"bytes as it is, and {min(one.peak for one in found):,} with all computed again that can "
        "be. Ask for that, shard more, or let the batch be smaller."
    )


def _attempt(
    graph: fx.GraphModule,
    inputs: Sequence[Any] | None,
    goal: int,
    at_once: bool,
    rates: tuple[float, float],
    tracing: Tracing,
) -> Recomputed:
    """Choose in rounds, each at the peak that the one before has left; return the last, or best.

    `at_once`: choose all that there is at a peak, and not only as much as the goal asks for.
    """
    module, _ = copied(graph, {})
    seconds: dict[str, float] = {}
    peaks: list[int] = []
    while True:
        of = trace_program(module, inputs, memory=tracing)
        peaks.append(profile(of.program, range(len(of.program))).peak)
        stuck = len(peaks) > _PATIENCE and min(peaks[-_PATIENCE:]) >= min(peaks[:-_PATIENCE])
        chosen = []
        if peaks[-1] > goal and not stuck and len(peaks) < _ROUNDS:
            chosen = Chooser(of, rates).choose(0 if at_once else goal)
        if not chosen:
            module.recompile()
            best = peaks[-1] if peaks[-1] <= goal else min(peaks)
            return Recomputed(module, peaks[0], best, tuple(seconds), sum(seconds.values()))
        for one in chosen:
            for node, source in repeat(module.graph, one, of):
                seconds[node.name] = computing_seconds(source, *rates)


class Chooser:
    """Which values to make again, of a graph in program order."""

    def __init__(self, of: TracedGraph, rates: tuple[float, float]) -> None:
        self.of, self.rates = of, rates
        self.step = {node: at for at, node in enumerate(of.nodes)}
        self.profile = profile(of.program, range(len(of.program)))
        # The last operation that writes to a storage: what is read later is another value.
        self.writes: dict[int, list[int]] = {}
        for at, keys in enumerate(of.written):
            for key in keys:
                self.writes.setdefault(key, []).append(at)
        # What is chosen is gone behind the peak, and what choices read has to stay: no later one
        # may read the first, or be one of the second.
        self.gone: set[int] = set()
        self.needed: set[int] = set()

    def choose(self, memory_bytes: int) -> list[Choice]:
        """Return choices that bring the peak below, or all that there are at it."""
        peak = self.profile.step
        found = list(self.candidates(peak))
        # By what a byte costs; of equals the large one, so that fewer operators run twice.
        found.sort(key=lambda one: (one.seconds / one.bytes, -one.bytes))
        left = self.profile.peak - memory_bytes
        chosen: list[Choice] = []
        for first in found:
            # Asked again: what it would read may be gone by now.
            one = self.choice(first.storage, peak) if self.gone else first
            if left <= 0 or one is None or one.storage in self.needed:
                continue
            chosen.append(one)
            self.gone.add(one.storage)
            self.needed |= one.reads
            left -= one.bytes
        return chosen

    def candidates(self, peak: int) -> Iterator[Choice]:
        """What lives across a step without being used there, and can be made again."""
        for at, storage in enumerate(self.of.program.storages):
            # It lives at the peak, and nobody needs it there.
            idle = storage.maker < peak < storage.users[-1] and peak not in storage.users
            if idle and storage.bytes and not storage.kept:
                found = self.choice(at, peak)
                if found is not None:
                    yield found

    def choice(self, at: int, peak: int) -> Choice | None:
        """Return how a storage is made again behind a step; None: it cannot be."""
        storage = self.of.program.storages[at]
        later = [one for one in storage.users if one > peak]
        before = self.of.nodes[later[0]]
        wanted = [
            node
            for user in later
            for node in self.of.nodes[user].all_input_nodes
            if self.step.get(node, peak) < peak and self._lies_in(node, at)
        ]
        found: dict[fx.Node, None] = {}
        reads: set[int] = set()
        if not wanted or not all(
            self._collect(node, later[0], at, found, reads) for node in dict.fromkeys(wanted)
        ):
            return None
        # In the order of the graph, in which each comes after what it reads.
        nodes = tuple(sorted(found, key=self.step.__getitem__))
        seconds = sum(computing_seconds(node, *self.rates) for node in nodes)
        return Choice(at, storage.bytes, nodes, before, frozenset(reads), seconds)

    def _lies_in(self, node: fx.Node, storage: int) -> bool:
        return any(one.storage == storage for one in self.of.results[node])

    def _collect(
        self,
        node: fx.Node,
        now: int,
        storage: int,
        found: dict[fx.Node, None],
        reads: set[int],
    ) -> bool:
        """Find what has to be repeated for a node's value at a step; False: it cannot be."""
        if node in found:
            return True
        at = self.step.get(node)
        # A draw, a collective or a write would do something a second time.
        if at is None or not self.of.plain[at] or self.of.written[at] or len(found) >= _LONGEST:
            return False
        found[node] = None
        for given in node.all_input_nodes:
            # The value that it read then is no longer there once somebody has written to it.
            if self._is_written(given, at, now):
                return False
            lying = {one.storage for one in self.of.results[given]} - {None}
            if given.op in ("placeholder", "get_attr") or self._lives(lying, now, storage):
                reads |= {one for one in lying if one is not None}
            elif not self._collect(given, now, storage, found, reads):
                return False
        # And nobody may have changed what it made.
        return not self._is_written(node, at, now)

    def _is_written(self, node: fx.Node, since: int, until: int) -> bool:
        return any(
            since < at < until
            for one in self.of.results[node]
            for at in self.writes.get(one.key, ())
        )

    def _lives(self, storages: set[int | None], now: int, repeated: int) -> bool:
        """Whether values are there at a step whatever is chosen; those without memory are not."""
        every = self.of.program.storages
        return bool(storages) and all(
            one is not None
            and one != repeated
            and one not in self.gone
            and (every[one].kept or every[one].users[-1] >= now)
            for one in storages
        )


def repeat(graph: fx.Graph, choice: Choice, of: TracedGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Repeat the nodes of a choice, and let who comes later read the repetition."""
    step = {node: at for at, node in enumerate(of.nodes)}
    made: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(choice.before):
        for node in choice.nodes:
            made[node] = graph.node_copy(node, lambda one: made.get(one, one))
            yield made[node], node
    since = step[choice.before]
    for node, again in made.items():
        for user in list(node.users):
            # Those that were repeated in front of the same node have no step yet.
            if step.get(user, -1) >= since:
                user.replace_input_with(node, again)
