"""A plan of collectives carried out on this rank's graph: merged, and in another order.

Results have the bits of the graph as it was: operators run on the same values. Draws, writes in
place and other effects keep their order among each other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import fx

from vescale_parallel._graph.collective_plan import Buckets
from vescale_parallel._graph.collectives import Collective, collectives, dependencies, ops
from vescale_parallel._graph.node_order import Memory, Waits, order_nodes, overlapped
from vescale_parallel._graph.values import fake_mode_of, say_value
from vescale_parallel._memory.graph_copy import copied_module
from vescale_parallel._memory.simulation import profile
from vescale_parallel._memory.tracing import Tracing

aten: Any = torch.ops.aten


def copied(module: fx.GraphModule, waits: Waits) -> tuple[fx.GraphModule, Waits]:
    """A copy whose nodes may be changed, and what those wait for; constants are shared."""
    made, copies = copied_module(module)
    return made, {copies[node]: {copies[one] for one in before} for node, before in waits.items()}


def rewrite_graph(
    module: fx.GraphModule,
    waits: Waits,
    buckets: Buckets,
    *,
    overlap: bool,
    ahead_bytes: int | None,
    memory_bytes: int | None,
    tracing: Tracing | None = None,
) -> tuple[fx.GraphModule, int, frozenset[int]]:
    """The graph with these collectives, started in this order, and the bytes of its peak.

    And which merged buckets have something that lives where more than `memory_bytes` does.

    Args:
        module: the graph; it stays as it is.
        waits: what each of its nodes waits for.
        buckets: for each collective of the new graph, those of the old one, by index.
        overlap: start as early, and wait as late, as the order allows.
        ahead_bytes: what may be under way before anything needs it; None: a gather, and
            reductions up to a fixed size.
        memory_bytes: what may live at once; what is started early is started later, and what is
            waited for late is waited for earlier, where more would live. None: no bound.
        tracing: what is known of nodes from other such calls for the same graph.
    """
    # The graph that was given stays: `schedule` tries several plans on it, and keeps one.
    made, waits = copied(module, waits)
    found = collectives(made.graph)
    # Noted before anything is merged: merged nodes stand where their last member stood.
    place = {node: at for at, node in enumerate(made.graph.nodes)}
    chain: list[tuple[fx.Node, int]] = []
    merged: dict[int, list[fx.Node]] = {}
    for number, bucket in enumerate(buckets):
        members = [found[at] for at in bucket]
        size = sum(one.bytes for one in members)
        start = members[0].start
        if len(members) > 1:
            merged[number] = [one for member in members for one in member.start.all_input_nodes]
            start, results = _merge(made, members, waits, place)
            if members[0].kind == "all_gather":
                merged[number] += results
            # Of a sum, a rank keeps its share, merged or not: only what is sent counts.
            merged[number].append(next(iter(start.users)))
        chain.append((start, size))
    for (before, _), (after, _) in pairwise(chain):
        # One chain of all collectives: backends match them by order, so every rank has to start
        # them in this one.
        waits[after].add(before)
    # Sorting is stable, and a bucket stands where its last member does.
    steps = [node for node in sorted(place, key=place.__getitem__) if node in waits]
    plain = order_nodes(waits, steps)
    _put(made, plain)
    _, peak, program = dependencies(made, tracing)
    order = plain
    if overlap:
        order, peak = overlapped(
            chain, waits, steps, ahead_bytes, Memory(program, plain, memory_bytes)
        )
        _put(made, order)
    made.graph.lint()
    made.recompile()
    if memory_bytes is None or peak <= memory_bytes:
        return made, peak, frozenset()
    index = {node: at for at, node in enumerate(plain)}
    during = profile(program, [index[node] for node in order]).during
    over = [at for at, size in enumerate(during) if size > memory_bytes]
    return made, peak, _alive_in(merged, order, over)


def _alive_in(
    merged: Mapping[int, Sequence[fx.Node]], order: Sequence[fx.Node], steps: Sequence[int]
) -> frozenset[int]:
    """Which buckets have something that lives at one of these steps.

    From the first member that is there, and waits for the others, to the last use of a result.
    """
    place = {node: at for at, node in enumerate(order)}
    found = set()
    for number, nodes in merged.items():
        first = min(place.get(node, 0) for node in nodes)
        last = max(place.get(user, 0) for node in nodes for user in [node, *node.users])
        if bisect_right(steps, last) > bisect_left(steps, first):
            found.add(number)
    return frozenset(found)


def _put(module: fx.GraphModule, order: Iterable[fx.Node]) -> None:
    output = module.graph.output_node()
    for node in order:
        output.prepend(node)


def _merge(
    module: fx.GraphModule, members: Sequence[Collective], waits: Waits, place: dict[fx.Node, int]
) -> tuple[fx.Node, list[fx.Node]]:
    """Put one collective in the place of several; returns the node that starts it, and results."""
    maker = _Maker(module, members, waits)
    merge = {
        "all_reduce": _reduced,
        "all_gather": _gathered,
        "reduce_scatter": _scattered,
        "all_to_all": _exchanged,
    }
    results = merge[members[0].kind](maker, members)
    # All inputs have to be there before the one collective can start.
    after = {one for member in members for one in waits[member.start]}
    replaced: dict[fx.Node, set[fx.Node]] = {}
    for member, result in zip(members, results, strict=True):
        member.wait.replace_all_uses_with(result)
        replaced[member.start] = {maker.start}
        replaced[member.wait] = {result}
    at = max(place[member.start] for member in members)
    for node in maker.made:
        waits[node] |= after
        place[node] = at
    for node, before in waits.items():
        for gone in before & replaced.keys():
            before.remove(gone)
            if node not in maker.made:
                before |= replaced[gone]
    for member in members:
        # The wait first: fx refuses to take out a node that another one uses.
        for gone in (member.wait, member.start):
            module.graph.erase_node(gone)
            waits.pop(gone)
            place.pop(gone)
    return maker.start, results


class _Maker:
    """Adds nodes that say what they make."""

    def __init__(self, module: fx.GraphModule, members: Sequence[Collective], waits: Waits) -> None:
        self.graph, self.waits = module.graph, waits
        self.made: list[fx.Node] = []
        self.start: fx.Node
        first = members[0]
        self.label = first.start.meta.get("label")
        self.mode = fake_mode_of(module.graph)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a node before the output; returns it."""
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.call_function(target, args, kwargs)
        say_value(node, self.mode)
        if self.label is not None:
            node.meta["label"] = self.label
        self.made.append(node)
        self.waits[node] = {one for one in node.all_input_nodes if one in self.waits}
        return node

    def sent(self, target: Any, *args: Any) -> Any:
        """Add a collective and its wait; returns the result."""
        self.start = self(target, *args)
        return self(ops.wait_tensor.default, self.start)

    def flat(self, member: Collective, *shape: int) -> Any:
        """What a member gives, of another shape."""
        return self(aten.reshape.default, member.start.args[0], list(shape))


def _reduced(make: _Maker, members: Sequence[Collective]) -> list[fx.Node]:
    flat = make(aten.cat.default, [make.flat(one, -1) for one in members])
    found = make.sent(ops.all_reduce.default, flat, members[0].how, members[0].group)
    return [
        make(aten.view.default, part, list(one.shape))
        for one, part in zip(members, _parts(make, found, 0, members, 1), strict=True)
    ]


def _gathered(make: _Maker, members: Sequence[Collective]) -> list[fx.Node]:
    count = len(members[0].ranks)
    flat = make(aten.cat.default, [make.flat(one, -1) for one in members])
    found = make.sent(ops.all_gather_into_tensor.default, flat, count, members[0].group)
    # One row from each rank: its parts of all members lie behind each other.
    rows = make(aten.view.default, found, [count, -1])
    results = []
    for one, part in zip(members, _parts(make, rows, 1, members, 1), strict=True):
        first, *others = one.shape or (1,)  # of a scalar from each rank, one row is made
        shape = [count * first, *others]
        # Copied: what follows is written for a result that lies in one piece.
        whole = make(aten.clone.default, part)
        results.append(make(aten.view.default, whole, shape))
    return results


def _scattered(make: _Maker, members: Sequence[Collective]) -> list[fx.Node]:
    count = len(members[0].ranks)
    # Along the second dim, so that the part of each rank lies in one piece.
    rows = make(aten.cat.default, [make.flat(one, count, -1) for one in members], 1)
    flat = make(aten.view.default, rows, [-1])
    how, group = members[0].how, members[0].group
    found = make.sent(ops.reduce_scatter_tensor.default, flat, how, count, group)
    return [
        make(aten.view.default, part, [one.shape[0] // count, *one.shape[1:]])
        for one, part in zip(members, _parts(make, found, 0, members, count), strict=True)
    ]


def _exchanged(make: _Maker, members: Sequence[Collective]) -> list[fx.Node]:
    count = len(members[0].ranks)
    # Along the second dim, so that what each rank gets lies in one piece.
    rows = make(aten.cat.default, [make.flat(one, count, -1) for one in members], 1)
    flat = make(aten.view.default, rows, [-1])
    each = sum(prod(one.shape) for one in members) // count
    sizes = [each] * count
    found = make.sent(ops.all_to_all_single.default, flat, sizes, sizes, members[0].group)
    # One row from each rank again.
    arrived = make(aten.view.default, found, [count, each])
    results = []
    for one, part in zip(members, _parts(make, arrived, 1, members, count), strict=True):
        if _is_read_by_rows(one, count):
            # They lie so: nothing is copied.
            results.append(part)
        else:
            whole = make(aten.clone.default, part, memory_format=torch.contiguous_format)
            results.append(make(aten.view.default, whole, list(one.shape)))
    return results


def _is_read_by_rows(member: Collective, count: int) -> bool:
    """Whether what an exchange brings is looked at as one row from each rank, and not otherwise."""
    shape = [count, prod(member.shape) // count]
    users = member.wait.users
    return all(one.target is aten.view.default and one.args[1] == shape for one in users)


def _parts(
    make: _Maker, whole: fx.Node, dim: int, members: Sequence[Collective], divisor: int
) -> Iterable[fx.Node]:
    start = 0
    for one in members:
        size = prod(one.shape) // divisor
        yield make(aten.slice.Tensor, whole, dim, start, start + size)
        start += size
