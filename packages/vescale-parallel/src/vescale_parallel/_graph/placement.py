"""Gathers where they are first used, twice where memory is given back, and sums when ready.

A graph is traced with all gathers first and all sums last. Here each gather goes to its first use;
of a unit that is given back after the forward, what the backward uses is gathered again. Uses come
in the order of modules; whether that is the same on all ranks the caller compares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import fx

from vescale_parallel._graph.collectives import collectives, dependencies, is_view, is_wait
from vescale_parallel._graph.node_order import Waits
from vescale_parallel._graph.rewrite import copied


def place_collectives(module: fx.GraphModule, again: Collection[str]) -> fx.GraphModule:
    """A copy of a traced graph with its gathers and sums in their places.

    Args:
        module: as `vescale_dtensor.storage.joint_stored` made it; it stays.
        again: first parameters of the units that are gathered again for the backward.
    """
    made, _ = copied(module, {})
    graph = made.graph
    # Gathers of parameters; those that the model itself makes stay where they are.
    gathers = [one for one in collectives(graph) if _is_gather(one.start)]
    order = {node: at for at, node in enumerate(graph.nodes)}
    first = {one.parameter: _first_use(one.start, order) for one in gathers}
    # What the forward uses last is what the backward uses first: it stays, as in eager mode.
    last = max(first, key=first.__getitem__, default="")
    for one in gathers:
        if one.parameter in again and one.parameter != last:
            _gather_again(graph, one.start)
    waits, *_ = dependencies(made)
    _sink(graph, waits)
    _hoist(graph, waits)
    graph.lint()
    made.recompile()
    return made


def _direction(node: fx.Node) -> str:
    return str(getattr(node.meta.get("label"), "direction", ""))


def _is_gather(node: fx.Node) -> bool:
    label = node.meta.get("label")
    return getattr(label, "op", "") == "gather"


def _first_use(start: fx.Node, order: Mapping[fx.Node, int]) -> int:
    looks = _views_of(start)
    # Views are made next to the gather: where the values are read is what counts.
    users = [user for look in looks for user in look.users if user not in looks]
    return min((order[user] for user in users), default=-1)


def _gather_again(graph: fx.Graph, start: fx.Node) -> None:
    """Let the backward use a gather of its own."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    looks = _views_of(start)
    late = [
        (user, look)
        for look in looks
        for user in look.users
        if user not in looks and _direction(user) in ("backward", "total")
    ]
    if not late:
        return
    before = min((user for user, _ in late), key=order.__getitem__)
    copies: dict[fx.Node, fx.Node] = {}
    needed = _leading_to({look for _, look in late}, looks)
    with graph.inserting_before(before):
        for node in sorted(needed, key=order.__getitem__):
            copy = copies[node] = graph.node_copy(node, lambda one: copies.get(one, one))
            copy.meta = {**node.meta, "again": True}
    for user, look in late:
        user.replace_input_with(look, copies[look])
    for node in sorted(looks, key=order.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _views_of(start: fx.Node) -> set[fx.Node]:
    """A collective, its wait, and all that only looks at what it has brought."""
    found, rest = {start}, [start]
    while rest:
        for user in rest.pop().users:
            if user not in found and (is_wait(user) or is_view(user)):
                found.add(user)
                rest.append(user)
    return found


def _leading_to(wanted: Iterable[fx.Node], among: Collection[fx.Node]) -> set[fx.Node]:
    found, rest = set(wanted), list(wanted)
    while rest:
        for node in rest.pop().all_input_nodes:
            if node in among and node not in found:
                found.add(node)
                rest.append(node)
    return found


def _sink(graph: fx.Graph, waits: Waits) -> None:
    """Move what gathers to right before its first use."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    after: dict[fx.Node, list[fx.Node]] = {}
    for node, before in waits.items():
        for one in before:
            after.setdefault(one, []).append(node)
    # From the end, so that what a node reads can follow it: a wait moves first, then its gather,
    # then the cast before that.
    for node in reversed(list(graph.nodes)):
        if node in waits and _is_gather(node) and node in after:
            min(after[node], key=order.__getitem__).prepend(node)
            order = {one: at for at, one in enumerate(graph.nodes)}


def _hoist(graph: fx.Graph, waits: Waits) -> None:
    """Move sums of gradients to right behind the last gradient that they add up."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    # In order, so that what sums need (a cast, a reshape) has moved before they do.
    for node in list(graph.nodes):
        if waits.get(node) and _direction(node) == "total":
            max(waits[node], key=order.__getitem__).append(node)
            order = {one: at for at, one in enumerate(graph.nodes)}
