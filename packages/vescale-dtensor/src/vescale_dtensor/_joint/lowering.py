"""A graph as it is executed: the same operators on the same values, with less to call from Python.

A step of a small model is a thousand calls of some microseconds, of which half only look at a
tensor in another way: a gathered parameter is a slice, a view and a transpose. Here a chain of
views of one fresh tensor is one view, equal views are one, and what changes nothing is dropped;
operators are called by functions of torch that call the very same overload, which takes a third
less time than calling the overload itself. No kernel runs otherwise, so results keep their bits,
and each storage lives from its maker to the last use of a view of it, as before. Collectives are
carried as in eager mode: over gloo what is small is exchanged at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, fx
from vescale_comm import graphs

aten: Any = torch.ops.aten
_sent: Any = torch.ops._c10d_functional
FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {
    aten.add.Tensor: torch.add,
    aten.as_strided.default: torch.as_strided,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.div.Tensor: torch.div,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
}
"""By overload, what calls it and no other one, given the same arguments (a test compares)."""
COLLECTIVES: Final[dict[Any, Callable[..., Any]]] = {
    _sent.all_gather_into_tensor.default: graphs.start_all_gather,
    _sent.all_reduce.default: graphs.start_all_reduce,
    _sent.wait_tensor.default: graphs.finish,
}
"""By overload, what starts it, or waits for it, with the same result."""
_FRESH: Final = (
    *(aten.cat.default, aten.clone.default, aten.mm.default),
    torch.ops._c10d_functional.wait_tensor.default,
)
"""Whose results begin where their storage does, and lie densely, whatever is passed."""
_VIEWS: Final = frozenset(
    {
        *(aten.alias.default, aten.as_strided.default, aten.detach.default, aten.expand.default),
        *(aten.permute.default, aten.select.int, aten.slice.Tensor, aten.squeeze.default),
        *(aten.squeeze.dim, aten.squeeze.dims, aten.t.default, aten.transpose.int),
        *(aten.unsqueeze.default, aten.view.default, aten.view.dtype, aten._unsafe_view.default),
    }
)
"""Of one tensor, always: `reshape` and `contiguous` say so as well, and may copy."""


class LoweredGraph:
    """Called as a graph is; made at the first call, and anew where the graph was recompiled."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._code: str | None = None
        self._run: Callable[..., Any] = module

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        # By identity: a graph that was changed and recompiled has other code.
        if self._module.code is not self._code:
            self._code = self._module.code
            self._run = lower_graph(self._module)
        return self._run(*args)


def lower_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy with fewer views, and functions for overloads; constants are shared.

    Args:
        module: its nodes say what they make (`meta["val"]`); those that do not stay as they are.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    # Where a shape is changed in place, a view that was taken before is another one.
    if not any(torch.Tag.inplace_view in getattr(n.target, "tags", ()) for n in graph.nodes):
        _merge_views(graph)
    carried = {node: COLLECTIVES[node.target] for node in graph.nodes if _is_waited_for(node)}
    for node in graph.nodes:
        if node in carried:
            if node.target is _sent.all_reduce.default and _is_handed_over(node.args[0]):
                node.kwargs = {"owned": True}
            node.target = carried[node]
        elif node.op == "call_function" and node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
        elif node.target is aten.view.default and node.args[1]:
            given, shape = node.args
            # Sizes one by one: a list of them takes half as long again to be read.
            node.op, node.target, node.args = "call_method", "view", (given, *shape)
    graph.lint()
    return fx.GraphModule(module, graph)


def _is_waited_for(node: fx.Node) -> bool:
    """Whether a node starts a collective, or waits for one, that nobody looks at in between."""
    if node.target not in COLLECTIVES:
        return False
    wait = _sent.wait_tensor.default
    if node.target is wait:
        # Of any other tensor it is torch's.
        return True
    return bool(node.users) and all(user.target is wait for user in node.users)


def _is_handed_over(node: Any) -> bool:
    """Whether a tensor is new, and is of no use to anybody but one node."""
    # By either name: the functions of torch are put in as the graph is walked through.
    return node.target in _COPIES and len(node.users) == 1


_COPIES: Final = (aten.cat.default, aten.clone.default, torch.cat, torch.clone)
Laid = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


def _merge_views(graph: fx.Graph) -> None:
    kept = _kept(graph)
    values: dict[fx.Node, Any] = {}
    known: dict[tuple[fx.Node, Laid], fx.Node] = {}
    for node in list(graph.nodes):
        source = _source(node)
        values[node] = node.meta.get("val") if source is None else _looked(node, values[source])
        laid = _laid(values[node])
        if laid is None or source is None or node in kept:
            continue
        root = _root(source, values)
        base = source if root is None else root
        if laid == _laid(values[base]):
            made = base
        elif (base, laid) in known:
            made = known[base, laid]
        elif root is not None and laid[-1] == values[root].dtype:
            with graph.inserting_before(node):
                made = graph.call_function(aten.as_strided.default, (root, *laid[:3]))
            made.meta, values[made] = {**node.meta, "val": values[node]}, values[node]
        else:
            made = node
        known[base, laid] = made
        if made is not node:
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if not node.users and _source(node) is not None:
            graph.erase_node(node)


def _looked(node: fx.Node, source: Tensor) -> Tensor:
    """What a view makes of what it looks at.

    Asked anew: where a pass has put a bucket in the place of a tensor, nodes behind it still say
    what they were when the tensor lay by itself.
    """
    mode = getattr(source, "fake_mode", None)
    with nullcontext() if mode is None else mode, torch.no_grad():
        made: Tensor = node.target(source, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return made


def _kept(graph: fx.Graph) -> set[fx.Node]:
    """Views that stay: results, which callers may write to, and what compiled code is given.

    A compiler makes code for arguments that are, or are not, one tensor.
    """
    callers = (node for node in graph.nodes if node.op in ("output", "call_module", "call_method"))
    return {given for node in callers for given in node.all_input_nodes}


def _source(node: fx.Node) -> fx.Node | None:
    """What a node looks at; None if it is no view, or that is not known to be a tensor."""
    if node.target not in _VIEWS or len(node.all_input_nodes) != 1:
        return None
    (given,) = node.all_input_nodes
    return given if node.args[:1] == (given,) and _laid(given.meta.get("val")) else None


def _root(node: fx.Node, values: Mapping[fx.Node, Any]) -> fx.Node | None:
    """The fresh tensor that a node is, or looks at in the end; None if it is not known to be."""
    at: fx.Node | None = node
    while at is not None:
        node, at = at, _source(at)
    if node.target not in _FRESH:
        return None
    # An offset into a storage is where a view of it begins only if its own is none.
    value: Tensor = values[node]
    return node if not value.storage_offset() and value.is_contiguous() else None


def _laid(value: Any) -> Laid | None:
    """How a tensor lies in its storage; None for all that has no numbers for it."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    offset: Any = value.storage_offset()
    found = (*value.shape, *value.stride(), offset)
    if any(type(one) is not int for one in found) or value.is_conj() or value.is_neg():
        return None  # symbolic sizes; and views that change what is read
    return tuple(value.shape), value.stride(), offset, value.dtype
