"""The collectives of a graph, and what each of them has to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, fx
from vescale_comm import as_group

from vescale_parallel._errors import GraphError, MemoryPlanError
from vescale_parallel._memory.program import Program
from vescale_parallel._memory.simulation import profile
from vescale_parallel._memory.tracing import Tracing, trace_program

ops: Any = torch.ops._c10d_functional
NAMESPACE: Final = "_c10d_functional"
KINDS: Final = {
    f"{NAMESPACE}::all_reduce": "all_reduce",
    f"{NAMESPACE}::all_gather_into_tensor": "all_gather",
    f"{NAMESPACE}::reduce_scatter_tensor": "reduce_scatter",
    f"{NAMESPACE}::all_to_all_single": "all_to_all",
    f"{NAMESPACE}::broadcast": "broadcast",
}
"""What a graph of `vescale_dtensor.joint`, or of a traced function, communicates by."""


@dataclass(frozen=True)
class Collective:
    """One collective of a graph.

    Attributes:
        start: the node that starts it.
        wait: the node that waits for it; its value is the result.
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or broadcast.
        how: the reduction; empty where nothing is reduced.
        group: name of the process group, of this rank.
        ranks: its members.
        dtype: of its elements.
        shape: of what this rank gives.
        bytes: of the whole tensor, as `vescale_parallel.cost` counts: what an all-gather makes, and
            what the others are given.
        parameter: whose gradient it sums, or whose values it gathers; empty if that is not known.
        direction: of the step that it is a part of; empty if that is not known.
        even: of an exchange (all_to_all), whether each member is sent equally much.
    """

    start: fx.Node
    wait: fx.Node
    kind: str
    how: str
    group: str
    ranks: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int
    parameter: str
    direction: str
    even: bool = False


def schema_name(node: fx.Node) -> str:
    """The name of an operator, `aten::mm`; empty if it is none."""
    schema: Any = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return schema_name(node) == f"{NAMESPACE}::wait_tensor"


def is_view(node: fx.Node) -> bool:
    """Whether a node makes nothing: it looks at its argument in another way."""
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    aliases = [one.alias_info for one in schema.returns]
    return bool(aliases) and all(one is not None and not one.is_write for one in aliases)


def collectives(graph: fx.Graph) -> list[Collective]:
    """All collectives, in the order in which they are started.

    Raises:
        GraphError: one that is of no known kind, or is not waited for exactly once.
    """
    found = []
    for node in graph.nodes:
        name = schema_name(node)
        if "c10d" not in name or is_wait(node):
            continue
        if name not in KINDS:
            raise GraphError(
                f"node '{node.name}' ({name}) communicates in a way that cannot be scheduled: "
                f"there are {', '.join(KINDS.values())} of torch's functional collectives"
            )
        waits = [user for user in node.users if is_wait(user)]
        # To move a start or a wait, there has to be one of each; and nobody may read what is
        # under way.
        if len(waits) != 1 or len(node.users) != 1:
            raise GraphError(
                f"node '{node.name}' ({name}) is not waited for exactly once: trace the step with "
                "vescale_dtensor.joint, or with make_fx on fake tensors"
            )
        found.append(_described(node, waits[0], KINDS[name]))
    return found


def _described(node: fx.Node, wait: fx.Node, kind: str) -> Collective:
    given: Any = node.args[0]
    value = given.meta.get("val")
    if not isinstance(value, Tensor):
        raise GraphError(f"node '{given.name}' says nothing of its shape (meta['val'])")
    name = str(node.args[-1])
    ranks = as_group(name).ranks
    size = prod(value.shape) * value.dtype.itemsize
    return Collective(
        node,
        wait,
        kind,
        str(node.args[1]) if kind in ("all_reduce", "reduce_scatter") else "",
        name,
        ranks,
        value.dtype,
        tuple(value.shape),
        size * len(ranks) if kind == "all_gather" else size,
        str(getattr(node.meta.get("label"), "parameter", "")),
        _direction(node),
        kind == "all_to_all" and _is_even(node, len(ranks)),
    )


def _is_even(node: fx.Node, members: int) -> bool:
    """Whether an exchange sends, and receives, parts of one size."""
    given: Any = node.args[1:3]
    sizes = [one for sizes in given for one in sizes]
    # Symbols are not compared: that would be a guard.
    return {int} == set(map(type, sizes)) and len(set(sizes)) == 1 and len(sizes) == 2 * members


def _direction(node: fx.Node) -> str:
    found = str(getattr(node.meta.get("label"), "direction", ""))
    # What is gathered again for the backward is a copy of what was gathered for the forward.
    return "backward" if node.meta.get("again") else found


def dependencies(
    module: fx.GraphModule, memory: Tracing | None = None
) -> tuple[dict[fx.Node, set[fx.Node]], int, Program]:
    """What each node waits for, the most bytes that live at once, and the graph's program.

    A node waits for its arguments, for writers and readers of memory, and for earlier draws.
    Collectives are not made to wait for each other: who orders them says so.

    Args:
        module: the graph.
        memory: see `tracing`.

    Raises:
        GraphError: the graph cannot run without values.
    """
    try:
        # Without the chain of collectives: their order is what a schedule is about to choose.
        of = trace_program(module, None, ("draws", "effects"), memory)
    except MemoryPlanError as error:
        raise GraphError(str(error)) from error
    nodes = of.nodes
    waits = {
        node: {nodes[at] for at in before}
        for node, before in zip(nodes, of.program.before, strict=True)
    }
    # Of fx, also where a node takes the value of one that nothing is planned for.
    for node in nodes:
        waits[node] |= {one for one in node.all_input_nodes if one in waits}
    return waits, profile(of.program, range(len(of.program))).peak, of.program


def needs(
    found: Sequence[Collective], waits: dict[fx.Node, set[fx.Node]]
) -> tuple[frozenset[int], ...]:
    """For each collective, those that have to be started before it, by their index."""
    index = {one.start: at for at, one in enumerate(found)}
    # Nodes come after what they wait for, so one pass finds what is needed at second hand, too.
    reached: dict[fx.Node, int] = {}  # a bit for each collective
    for node, before in waits.items():
        bits = 0
        for one in before:
            # Transitively, in one number for each node: sets would grow with the square of a graph.
            bits |= reached[one]
            if one in index:
                bits |= 1 << index[one]
        reached[node] = bits
    return tuple(
        frozenset(at for at in range(len(found)) if reached[one.start] >> at & 1) for one in found
    )
