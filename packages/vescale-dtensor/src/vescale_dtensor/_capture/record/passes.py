"""Passes over a recorded graph: remove what no output and no side effect needs.

Sums over ranks take the memory of their terms where nobody else uses these. In eager mode an
all-reduce makes a tensor of its own, and an autograd node joins it to the history of the term. In a
program it is known who uses the term: that saves a copy, two aliases, and a node in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from vescale_dtensor._autograd.grad_property import drop_gradient, drop_gradients
from vescale_dtensor._autograd.hooks import hooked_node
from vescale_dtensor._autograd.uses import CotangentReduction, alias_for_use, fork_uses
from vescale_dtensor._capture.record.graph import InputSource, TracedGraph
from vescale_dtensor._capture.record.regions import fold_regions, has_regions
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.overridable import implementation_of

# Nodes have the plain functions, without the test for modes.
_FORK, _HOOKED = implementation_of(fork_uses), implementation_of(hooked_node)
_DROP = implementation_of(drop_gradient)
# Positional arguments of torch.autograd.backward that come before `create_graph`.
_BEFORE_CREATE_GRAPH = 3


def is_free_local(source: InputSource) -> bool:
    """Whether an argument of a program is the local tensor of a free DTensor."""
    return isinstance(source.holder, DTensor)


def graph_module(trace: TracedGraph) -> fx.GraphModule:
    """The finished graph as a module; its last arguments are the local tensors of free DTensors."""
    graph = trace.graph
    _remove_dead_code(trace)
    _remove_copies(graph)
    _remove_read_copies(graph)
    # Second derivatives are taken of what outlives the program, or is differentiated inside.
    # And a region's steps save the same tensors when they run again.
    if _is_closed(trace) and not has_regions(graph):
        _remove_retyping(trace)
        _sum_terms_in_place(trace)
    _drop_gradients_together(graph)
    fold_regions(trace)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    # `Program.arguments` appends these, as the guard has them in a list already. The order among
    # them is that of `Program.sources`, which is made of this graph.
    last = inputs[-1:]
    for node in inputs[:-1]:
        if is_free_local(trace.sources[node]):
            last[0].append(node)
            last = [node]
    # Only constants that are still used: the others would be kept alive as long as the program.
    names = [str(n.target) for n in graph.nodes if n.op == "get_attr"]
    return fx.GraphModule({name: trace.constants[name] for name in names}, graph, "Program")


def _remove_copies(graph: fx.Graph) -> None:
    """Use a tensor itself in place of its clone, where neither is written to or returned.

    Only of what the program makes: the caller may write to what it passed in.
    """
    # By storage, so that writes to views count.
    written = {memory for node in graph.nodes for memory in node.meta.get("writes", ())}
    output = next(iter(reversed(graph.nodes)))
    returned = {node.meta["memory"][0] for node in output.all_input_nodes if "memory" in node.meta}
    # Arguments may share memory with each other and with what the caller holds.
    outside = {_memory(node) for node in graph.nodes if node.op == "placeholder"}
    for node in list(graph.nodes):
        if node.op != "call_method" or node.target != "clone" or "memory" not in node.meta:
            continue
        source = node.args[0]
        both = {_memory(source), _memory(node)}
        # None: not strided, or not a tensor; nothing is known of its memory.
        if None in both or both & (written | returned | outside):
            continue
        if source.meta["memory"][1] == node.meta["memory"][1]:  # in the same order, too
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _remove_retyping(trace: TracedGraph) -> None:
    """Use a tensor itself in place of an alias of its own data that only types its gradient.

    The type matters to second derivatives alone, so none may be asked for afterwards. Gradients
    are added up in the order in which eager adds them: only the next step may use the alias.
    """
    graph = trace.graph
    for node in [n for n in graph.nodes if n.target is alias_for_use]:
        source, data = node.args[:2]
        while data.target == "detach":
            data = data.args[0]
        following = node.next
        while following.op == "get_attr":
            following = following.next
        if data is source and list(node.users) == [following]:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        # What only such an alias had read. Users come after, so from the end.
        if node.target == "detach" and not node.users and not node.meta.get("effect"):
            graph.erase_node(node)


def _is_closed(trace: TracedGraph) -> bool:
    """Whether no gradient graph of a program outlives it, or is built of another one."""
    nodes = list(trace.graph.nodes)
    # A hook sits on a node, which leaving out an alias would take away.
    if any([node.target is _HOOKED or _differentiates_again(node) for node in nodes]):
        return False
    # An argument written to with a history carries it out of the program.
    if any(trace.has_new_history(node) for node in nodes if node.op == "placeholder"):
        return False
    # Not known counts as with grad.
    return not any(node.meta.get("grad", True) for node in nodes[-1].all_input_nodes)


def differentiates(node: fx.Node) -> bool:
    """Whether a step is a backward."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in ("backward", "grad")


def _differentiates_again(node: fx.Node) -> bool:
    """Whether a backward in the program makes a graph of itself."""
    return differentiates(node) and (
        bool(node.kwargs.get("create_graph")) or len(node.args) > _BEFORE_CREATE_GRAPH
    )


def _memory(node: fx.Node) -> int | None:
    """The storage of a node's tensor; None if it is not known."""
    known: tuple[int, tuple[int, ...]] | None = node.meta.get("memory")
    return None if known is None else known[0]


def _drop_gradients_together(graph: fx.Graph) -> None:
    """Drop gradients that are dropped one after the other in one step."""
    run: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.target is _DROP:
            run.append(node)
        # Only neighbours are joined: a step in between might read a gradient.
        elif node.op != "get_attr":
            _joined(run)
            run = []


def _joined(drops: list[fx.Node]) -> None:
    """Make one step of several drops, in the place of the last one."""
    if len(drops) < 2:
        return
    last = drops[-1]
    arguments = [list(column) for column in zip(*(node.args for node in drops), strict=True)]
    with last.graph.inserting_before(last):
        joined = last.graph.call_function(drop_gradients, tuple(arguments))
    joined.meta.update(last.meta)
    for node in drops:
        node.graph.erase_node(node)


def _remove_dead_code(trace: TracedGraph) -> None:
    """Drop steps without effect whose results are not used; then unused arguments."""
    graph = trace.graph
    hooked = any([node.target is _HOOKED for node in graph.nodes])
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op != "output" and not node.meta.get("effect"):
            graph.erase_node(node)
        elif node.target is _FORK and not hooked:  # a hook counts on all aliases
            reduction = trace.constants[str(node.args[3].target)]
            assert isinstance(reduction, CotangentReduction)
            _keep_used_aliases(node, reduction)


def _keep_used_aliases(fork: fx.Node, reduction: CotangentReduction) -> None:
    """Keep only the aliases that are used; replace a node with one alias by a plain one."""
    source, data, masks, reduction_node, shape = fork.args
    assert isinstance(masks, tuple)
    used = sorted({user.args[1] for user in fork.users})  # type: ignore[type-var]
    for user in list(fork.users):
        user.args = (fork, used.index(user.args[1]))
    masks = tuple(masks[i] for i in used)  # type: ignore[index]
    fork.args = (source, data, masks, reduction_node, shape)
    if reduction.is_identity(masks, shape):  # type: ignore[arg-type]
        (alias,) = fork.users
        with fork.graph.inserting_before(fork):
            arguments = (source, data, masks[0], reduction_node, shape)
            direct = fork.graph.call_function(alias_for_use, arguments)
        direct.meta.update(alias.meta)
        alias.replace_all_uses_with(direct)
        fork.graph.erase_node(alias)
        fork.graph.erase_node(fork)


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


def _sum_terms_in_place(trace: TracedGraph) -> None:
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


def _remove_read_copies(graph: fx.Graph) -> None:
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
