"""Passes over a recorded graph: remove what no output and no side effect needs."""

from __future__ import annotations

from torch import fx

from vescale_dtensor._autograd.grad_property import drop_gradient, drop_gradients
from vescale_dtensor._autograd.hooks import hooked_node
from vescale_dtensor._autograd.uses import CotangentReduction, alias_for_use, fork_uses
from vescale_dtensor._capture.graph import InputSource, TracedGraph
from vescale_dtensor._capture.in_place_sums import remove_read_copies, sum_terms_in_place
from vescale_dtensor._capture.regions import fold_regions, has_regions
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
    remove_read_copies(graph)
    # Second derivatives are taken of what outlives the program, or is differentiated inside.
    # And a region's steps save the same tensors when they run again.
    if _is_closed(trace) and not has_regions(graph):
        _remove_retyping(trace)
        sum_terms_in_place(trace)
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
