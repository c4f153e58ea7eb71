"""Sums over ranks in the memory of their terms, where a program is the only one to know of these.

In eager mode an all-reduce makes a tensor of its own, and an autograd node joins it to the history
of the term. In a program it is known who uses the term: if nobody else does, the sum may take its
place, with the history that is there. That saves a copy, two aliases, and a node in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from vescale_dtensor._autograd.uses import alias_for_use
from vescale_dtensor._capture.graph import TracedGraph

# Steps whose result is new memory, that their own backward does not read: it may be overwritten.
_NOT_SAVED = frozenset(
    {"add", "sub", "mul", "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "sum"}
)
# Steps that read their operands now, and never again: nothing of them is saved for a backward.
_READ_ONCE = frozenset({"add", "sub"})


def sum_in_place(source: Tensor, collective: Any, owning: Any) -> Tensor:
    """Sum a tensor over ranks in its own memory; a step of programs.

    Args:
        source: with its history. Nothing else has read it, or will read its old values.
        collective: the sum.
        owning: the same one, of a buffer that it may write to.
    """
    own = source.detach()
    # What is not contiguous, no backend can write to.
    total = owning.run(own) if own.is_contiguous() else collective.run(own)
    if total is not own:  # it was added up elsewhere: in another order, or another dtype
        own.copy_(total)
    return source


def sum_terms_in_place(trace: TracedGraph) -> None:
    """Sum in place what no other step reads. Of programs that no gradient graph outlives."""
    graph = trace.graph
    known: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if n.target is alias_for_use]:
        source, total = node.args[:2]
        collective = _sum_of(total, source, node)
        if collective is None:
            continue
        (given,) = (n for n in total.all_input_nodes if n.op != "get_attr")
        with graph.inserting_before(total):
            owning = known.get(str(collective.target))
            if owning is None:
                value: Any = trace.constants[str(collective.target)]
                owning = known[str(collective.target)] = trace.constant(value.owning(), check=False)
            made = graph.call_function(sum_in_place, (source, collective, owning))
        made.meta.update(total.meta)
        made.meta["grad"] = node.meta.get("grad", True)
        if "layout" in node.meta:
            made.meta["layout"] = node.meta["layout"]
        node.replace_all_uses_with(made)
        for gone in (node, total, given):
            graph.erase_node(gone)


def _sum_of(total: fx.Node, source: fx.Node, alias: fx.Node) -> fx.Node | None:
    """The collective, a constant, that sums what `source` is, for this alias alone; else None."""
    records = total.meta.get("records", ())
    if len(records) != 1 or records[0].op != "all_reduce" or len(total.args) != 2:
        return None
    collective, given = total.args
    if not isinstance(collective, fx.Node) or not isinstance(given, fx.Node):
        return None
    if collective.op != "get_attr" or given.target != "detach" or given.args[0] is not source:
        return None
    alone = list(total.users) == [alias] and list(given.users) == [total]
    if not alone or set(source.users) != {given, alias} or _name(source) not in _NOT_SAVED:
        return None
    return collective


def remove_read_copies(graph: fx.Graph) -> None:
    """Use a tensor itself in place of its clone, where the clone is only added to others.

    Also of arguments, which somebody else may write to later: nothing reads them later.
    """
    for node in list(graph.nodes):
        if node.op != "call_method" or node.target != "clone" or "memory" not in node.meta:
            continue
        source = node.args[0]
        if "memory" not in source.meta or source.meta["memory"][1] != node.meta["memory"][1]:
            continue  # in another order
        if node.meta.get("grad", True):
            continue  # gradients would be added up in another order
        users = list(_users(node))
        if not users or any(_name(user) not in _READ_ONCE for user in users):
            continue
        if not _has_effects_between(node, users):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """The steps that use a tensor, itself or as an alias with another history."""
    for user in node.users:
        if user.target is alias_for_use and user.args[0] is not node:
            yield from user.users
        else:
            yield user


def _has_effects_between(node: fx.Node, users: list[fx.Node]) -> bool:
    """Whether a step between a node and the last of its users writes anything."""
    left = set(users)
    current = node.next
    while left:
        left.discard(current)
        if left and current.meta.get("effect"):
            return True
        current = current.next
    return False


def _name(node: fx.Node) -> str:
    """The name of the function of a step that makes a tensor; else nothing."""
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return ""
    target: Any = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))
