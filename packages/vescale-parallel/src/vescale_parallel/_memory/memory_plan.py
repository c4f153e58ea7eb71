"""A plan of the memory of a graph: what it says, and what can be done with it."""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

from torch import Tensor, export, fx

from vescale_parallel._common.messages import did_you_mean, human_bytes, listed, table
from vescale_parallel._errors import MemoryPlanError
from vescale_parallel._memory.arena import Arena
from vescale_parallel._memory.caching import reserved
from vescale_parallel._memory.graph_copy import copied_module
from vescale_parallel._memory.highs import by_highs, has_highs
from vescale_parallel._memory.layout import ArenaLayout, Block, aligned, laid_out, most_at_once
from vescale_parallel._memory.order_choice import (
    ChosenOrder,
    by_search,
    choose_order,
    ordered_by_ilp,
)
from vescale_parallel._memory.picture import as_svg
from vescale_parallel._memory.places import Place, arena_device, places
from vescale_parallel._memory.simulation import lifetimes
from vescale_parallel._memory.tracing import TracedGraph, trace_program

Solver = Literal["auto", "search", "highs", "rules", "ilp"]
_HEIGHTS: Final = 60  # of an arena that are compared, at most
SOLVERS: Final = ("auto", "search", "highs", "rules", "ilp")
_FIRST: Final = "program order"
ALIGNMENT: Final = 64  # bytes: what vector instructions want, and torch's CPU allocator gives
# What torch's allocators of devices give. Libraries choose kernels by it: cuBLASLt asks for
# alignments up to 256, and another kernel may add up in another order.
_ON_DEVICES: Final = 512


@dataclass(frozen=True)
class MemoryPlan:
    """In which order a graph runs, and where everything that it makes lies.

    All sizes are bytes of what the graph makes; its inputs and constants are not counted, nor is
    what a kernel takes for itself (a convolution's workspace), unless `workspaces` told.

    Attributes:
        solver: how it was asked for.
        seconds: that planning took.
        complete: whether it is proven best, or no search was cut short by time.
        alignment: in bytes, of the arena and of each storage in it.
    """

    solver: str
    seconds: float
    complete: bool
    alignment: int
    _traced: TracedGraph
    _ordered: ChosenOrder
    _layout: ArenaLayout
    _places: Mapping[int, Place]
    _placed: tuple[int, ...]  # storages in the arena
    _calls: tuple[Any, ...]  # of the graph that was planned

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the nodes that compute, in the order in which they run."""
        return tuple(self._traced.nodes[at].name for at in self._ordered.order)

    @property
    def offsets(self) -> dict[str, int]:
        """Where each storage of the arena begins, by the name of the node that makes it."""
        names = (self._traced.program.storages[at].name for at in self._placed)
        return dict(zip(names, self._layout.offsets, strict=True))

    @property
    def peak(self) -> int:
        """The most that lives at once in the planned order."""
        return self._ordered.profile.peak

    @property
    def program_peak(self) -> int:
        """The most that lives at once in the order of the graph as it was given."""
        return self._ordered.peaks[_FIRST]

    @property
    def lower_bound(self) -> int:
        """Bytes below which no order of the graph is."""
        return self._ordered.lower_bound

    @property
    def gap(self) -> float:
        """How far the peak is above the lower bound: 0 is proven best, 0.1 at most 10 % above."""
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def peaks(self) -> dict[str, int]:
        """The peak of each way that was tried to find an order."""
        return dict(self._ordered.peaks)

    @property
    def arena(self) -> int:
        """Size of the one block that holds all that can be placed in it."""
        return self._layout.size

    @property
    def arena_lower_bound(self) -> int:
        """What lives at once of what is placed: no layout is smaller."""
        return self._layout.lower_bound

    @cached_property
    def _lives(self) -> list[tuple[int, int]]:
        return lifetimes(self._traced.program, self._ordered.order)

    @cached_property
    def outside_at(self) -> tuple[int, ...]:
        """Bytes that live outside of the arena, at each step of the order."""
        of, inside = self._traced.program, {*self._placed}
        changes = [0] * (len(of) + 1)
        for at, (one, (first, last)) in enumerate(zip(of.storages, self._lives, strict=True)):
            if at not in inside:
                changes[first] += one.bytes
                # Behind its last step, in which it is still there.
                changes[last + 1] -= one.bytes
        temporary = (of.operations[at].temporary for at in self._ordered.order)
        live = itertools.accumulate(changes[:-1])
        return tuple(one + other for one, other in zip(live, temporary, strict=True))

    @property
    def outside(self) -> int:
        """The most that lives at once outside of the arena.

        Those are the results of the graph, and what operators make that cannot be told where.
        """
        return max(self.outside_at, default=0)

    @property
    def executed_peak(self) -> int:
        """What `run` holds at most: the arena, and what lies outside of it."""
        return self.arena + self.outside

    @cached_property
    def reserved(self) -> dict[str, int]:
        """What torch's caching allocator would reserve, simulated, for both orders."""
        of = self._traced.program
        return {
            "program order": reserved(of, range(len(of))),
            "planned order": reserved(of, self._ordered.order),
        }

    def _check_unchanged(self) -> None:
        if _calls(self._traced.module) != self._calls:
            raise MemoryPlanError(
                "the graph has been changed since it was planned, so the plan is of another one: "
                "plan it again."
            )

    @cached_property
    def _arena(self) -> Arena:
        self._check_unchanged()
        offsets = dict(zip(self._placed, self._layout.offsets, strict=True))
        return Arena(
            self._traced,
            self._ordered.order,
            self._places,
            offsets,
            self._layout.size,
            self.alignment,
            arena_device(self._traced),
        )

    def run(self, *inputs: Any, arena: Tensor | None = None) -> Any:
        """Run the graph in the planned order and layout, to the same bits.

        Nothing is recorded for autograd, and autocast casts nothing: trace the backward, and the
        casts, into the graph. Results never lie in the arena, so it can be used again.

        Args:
            inputs: as the graph takes them, of the shapes, strides and dtypes that were planned.
            arena: a contiguous uint8 tensor of at least `arena` bytes; else a new one.

        Raises:
            MemoryPlanError: inputs or arena do not fit the plan, or the graph has been changed.
        """
        graph = self._traced.module.graph
        flat = graph.process_inputs(*inputs)
        return graph.process_outputs(self._arena.run(flat, arena))

    def apply(self) -> fx.GraphModule:
        """Return the graph with its nodes in the planned order, on the parameters of the given one.

        It is an ordinary module, for any allocator and any compiler, and computes the same bits.
        """
        self._check_unchanged()
        made, copies = copied_module(self._traced.module)
        # Each one to the end in turn, so that the planned order is what is left.
        end = made.graph.output_node()
        for at in self._ordered.order:
            end.prepend(copies[self._traced.nodes[at]])
        made.graph.lint()
        made.recompile()
        return made

    def svg(self) -> str:
        """Draw the plan: steps from left to right, addresses from the bottom up."""
        of = self._traced.program.storages
        title = (
            f"{len(self.order)} operations; most alive {human_bytes(self.peak)}, in program order "
            f"{human_bytes(self.program_peak)}; gap to the lower bound {self.gap:.1%}"
        )
        return as_svg(
            [of[at].name for at in self._placed],
            [Block(of[at].bytes, *self._lives[at]) for at in self._placed],
            self._layout,
            self.outside_at,
            title,
        )

    def to_json(self) -> str:
        """All that the plan says, for programs; sizes in bytes."""
        return json.dumps(
            {
                "peak": self.peak,
                "program_peak": self.program_peak,
                "lower_bound": self.lower_bound,
                "gap": self.gap,
                "peaks": self.peaks,
                "arena": self.arena,
                "arena_lower_bound": self.arena_lower_bound,
                "outside": self.outside,
                "executed_peak": self.executed_peak,
                "reserved": self.reserved,
                "solver": self.solver,
                "seconds": self.seconds,
                "complete": self.complete,
                "order": self.order,
                "offsets": self.offsets,
            },
            indent=2,
        )

    def __str__(self) -> str:
        rows: list[tuple[str, int]] = [
            ("most alive, program order", self.program_peak),
            *((f"most alive, {name}", size) for name, size in self.peaks.items() if name != _FIRST),
            ("most alive, planned", self.peak),
            ("lower bound of any order", self.lower_bound),
            (f"arena, {len(self._placed)} of {len(self._traced.program.storages)}", self.arena),
            ("lower bound of any layout", self.arena_lower_bound),
            ("most alive outside of the arena", self.outside),
            ("executed: arena and outside", self.executed_peak),
            *((f"caching allocator, {name}", size) for name, size in self.reserved.items()),
        ]
        whole = max(1, self.program_peak)
        told = [[what, human_bytes(size), f"{size / whole:.3f}"] for what, size in rows]
        header = ["what", "bytes", "of program order"]
        ended = "every search ended" if self.complete else "the best when time was over"
        return (
            f"{table(header, told, right=header[1:])}\n\n{len(self.order)} operations planned in "
            f"{self.seconds:.1f} s ({self.solver}; {ended}); gap {self.gap:.1%}"
        )


def plan(
    graph: fx.GraphModule | export.ExportedProgram,
    *,
    inputs: Sequence[Any] | None = None,
    solver: Solver = "auto",
    seconds: float = 10.0,
    alignment: int | None = None,
    workspaces: Mapping[str, int] | None = None,
) -> MemoryPlan:
    """Plan the memory of a torch.fx graph: the order of its nodes, and where their results lie.

    The peak is never above that of the graph's own order. Writes in place, collectives, and the
    random draws of the graph keep their order. No process group, mesh or device is needed.

    Args:
        graph: of `make_fx`, `torch.export`, `torch.fx.symbolic_trace` or anything else.
        inputs: examples for it, where its placeholders do not say what they are.
        solver: `"search"`: rules, then branch and bound; `"auto"`: the same, with HiGHS for small
            layouts where scipy is installed; `"highs"`: HiGHS in place of branch and bound;
            `"rules"`: no search; `"ilp"`: one integer program over all operations and steps, in
            the form of MODeL, to compare with: minutes to hours, and program order if time is over.
        seconds: for all searches together; when they are over, the best so far is the plan.
        alignment: of each storage in the arena, in bytes, a power of two; by default that of
            torch's allocator, 64 on the host and 512 on other devices.
        workspaces: bytes that nodes take for themselves while they run, by name (`workspaces`).

    Raises:
        MemoryPlanError: shapes depend on data, inputs are missing, or scipy is.
    """
    start = time.monotonic()
    solver = _known(solver)
    # A power of two has one bit, which the number below does not have.
    if alignment is not None and (alignment < ALIGNMENT or alignment & (alignment - 1)):
        raise MemoryPlanError(f"alignment {alignment}: a power of two from {ALIGNMENT} on.")
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise MemoryPlanError(f"seconds {seconds}: no time to plan in; 0 leaves out searches.")
    module = graph.module() if isinstance(graph, export.ExportedProgram) else graph
    if not isinstance(module, fx.GraphModule):
        raise MemoryPlanError(
            f"a {type(graph).__name__} is no torch.fx graph: trace it with "
            "torch.fx.experimental.proxy_tensor.make_fx, or with torch.export.export."
        )
    # Nodes can be changed later: `run` and `apply` compare with what was planned.
    calls = _calls(module)
    of = _with_workspaces(trace_program(module, inputs), workspaces or {})
    # Two thirds of the time are for the order, as layouts hardly ever need any.
    deadline = start + seconds * 2 / 3
    if solver == "ilp":
        found = ordered_by_ilp(of.program, deadline=deadline)
    else:
        solve = {"rules": None, "highs": by_highs}.get(solver, by_search)
        found = choose_order(of.program, deadline=deadline, solve=solve)
    if alignment is None:
        alignment = ALIGNMENT if arena_device(of).type == "cpu" else _ON_DEVICES
    ways = places(of)
    placed = [at for at, one in enumerate(of.program.storages) if one.maker in ways]
    lives = lifetimes(of.program, found.order)
    layout = laid_out(
        [Block(aligned(of.program.storages[at].bytes, alignment), *lives[at]) for at in placed],
        deadline=start + seconds,
        highs=solver in ("auto", "highs") and has_highs(),
    )
    placed, layout = _worth_it(of, found.order, placed, layout)
    ways = {of.program.storages[at].maker: ways[of.program.storages[at].maker] for at in placed}
    took = time.monotonic() - start
    return MemoryPlan(
        solver, took, found.complete, alignment, of, found, layout, ways, tuple(placed), calls
    )


def _calls(module: fx.GraphModule) -> tuple[Any, ...]:
    """What a graph calls, with what, in its order."""
    return tuple((one, one.op, one.target, one.args, one.kwargs) for one in module.graph.nodes)


def _worth_it(
    of: TracedGraph, order: Sequence[int], placed: Sequence[int], layout: ArenaLayout
) -> tuple[list[int], ArenaLayout]:
    """Leave out of the arena what reaches above a height, where that lowers the executed peak.

    The arena is there all the time, also when most lives outside of it. At height 0 the executed
    peak is that of the order. Of the heights within a hundredth of the best, the largest is taken.
    """
    stores, lives = of.program.storages, lifetimes(of.program, order)
    # An operation either writes into the arena, with all its results, or it does not.
    ends: dict[int, int] = {}
    for at, offset in zip(placed, layout.offsets, strict=True):
        maker = stores[at].maker
        ends[maker] = max(ends.get(maker, 0), offset + stores[at].bytes)
    heights = sorted({layout.size, 0, *ends.values()})
    # Each is one sweep over all storages. The whole height is always among them.
    heights = [*heights[:: -(-len(heights) // _HEIGHTS)], layout.size]
    temporary = [
        Block(of.program.operations[at].temporary, step, step) for step, at in enumerate(order)
    ]
    sizes = {}
    for height in heights:
        outside = [
            Block(one.bytes, *lives[at])
            for at, one in enumerate(stores)
            if ends.get(one.maker, height + 1) > height
        ]
        sizes[height] = height + most_at_once([*outside, *temporary])
    # Within a hundredth the larger arena: what lies in it costs no allocation at all.
    best = min(sizes.values())
    height = max(one for one, size in sizes.items() if size <= best + best // 100)
    kept = [
        (at, offset)
        for at, offset in zip(placed, layout.offsets, strict=True)
        if ends[stores[at].maker] <= height
    ]
    size = max((offset + stores[at].bytes for at, offset in kept), default=0)
    live = most_at_once([Block(stores[at].bytes, *lives[at]) for at, _ in kept])
    return [at for at, _ in kept], ArenaLayout(
        tuple(at for _, at in kept), size, live, layout.sizes
    )


def _with_workspaces(of: TracedGraph, workspaces: Mapping[str, int]) -> TracedGraph:
    if not workspaces:
        return of
    unknown = {*workspaces} - {one.name for one in of.module.graph.nodes}
    if unknown or min(workspaces.values()) < 0:
        raise MemoryPlanError(
            f"workspaces name {listed(sorted(unknown))}, which the graph does not have, or sizes "
            "below 0: take those of memory.workspaces for the same graph."
        )
    operations = tuple(
        replace(one, temporary=max(one.temporary, workspaces.get(one.name, 0)))
        for one in of.program.operations
    )
    return replace(of, program=replace(of.program, operations=operations))


def _known(solver: str) -> Any:
    if solver not in SOLVERS:
        raise MemoryPlanError(
            f"solver {solver!r}: there are {', '.join(SOLVERS)}.{did_you_mean(solver, SOLVERS)}"
        )
    if solver in ("highs", "ilp") and not has_highs():
        raise MemoryPlanError(
            f"solver {solver!r} needs scipy: pip install vescale-parallel[memory], or "
            "solver='search'."
        )
    return solver
