"""Custom autograd.Functions with DTensors: joins their graph, which is on wrappers, to the locals'.

`Function.apply` never asks `__torch_function__`. C++ sees wrappers that require grad and gives the
wrappers that come out an autograd node: a graph of its own, beside the graph of the local tensors,
from which no gradient would reach them. At the first use of such an output a bridge joins the two:
a node on the locals whose backward runs the hidden graph, with DTensors in and out.

So a Function's backward sees DTensors, as its forward did, and so do hooks on its node; the full
backward hooks of modules are such hooks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from vescale_dtensor._autograd.conversion import as_replicated
from vescale_dtensor._autograd.grad_fn import LocalNode
from vescale_dtensor._autograd.local_use import local_for_use, local_outside_autograd
from vescale_dtensor._autograd.user_gradients import as_cotangent, as_gradient
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.state import history_replaced
from vescale_dtensor._torch.compat import (
    engine_gradients,
    hidden_node,
    marked_to_want_gradients,
    mirror_requires_grad,
    swap_metadata,
)

_SIBLINGS = "vescale_dtensor.outputs"


class BridgedGraph(NamedTuple):
    """What a bridge needs to go back over it.

    Attributes:
        holders: own the hidden node, one for each output; nobody else uses them.
        specs: of the outputs.
        sources: the tensors that the hidden graph ends in: wrappers, and plain leaves.
        saved: what the Function saved, with versions: C++ counts those of the wrappers only.
    """

    holders: tuple[DTensor, ...]
    specs: tuple[Spec, ...]
    sources: tuple[Tensor, ...]
    saved: tuple[tuple[Tensor, int], ...]


# How many hidden graphs run at present, in any thread: a backward runs in threads of its own.
_running: list[None] = []


def node_of(tensor: DTensor) -> Any:
    """See `DTensor.grad_fn`: the Function's own node, or a stand-in for that of the local."""
    if tensor._may_have_hidden_node:
        node = hidden_node(tensor)
        if node is not None:
            # Asked for together, they are bridged together, so that a hook on the node sees all.
            filed = node.metadata.setdefault(_SIBLINGS, [])
            if all(known() is not tensor for known in filed):
                filed.append(weakref.ref(tensor))
            return node
    if tensor._function_node is not None:
        return tensor._function_node
    local = tensor._local_tensor.grad_fn
    return None if local is None else LocalNode(local)


def is_leaf(tensor: DTensor) -> bool:
    """See `DTensor.is_leaf`: of what a custom Function made, the local knows nothing yet."""
    leaf: bool = tensor._local_tensor.is_leaf
    return leaf and not (tensor._may_have_hidden_node and hidden_node(tensor) is not None)


def wants_gradient(tensor: DTensor) -> bool:
    """See `DTensor.requires_grad`, for one that a custom Function may have made."""
    if tensor._local_tensor.requires_grad or hidden_node(tensor) is not None:
        return True
    return tensor._from_checkpoint and marked_to_want_gradients(tensor)


def bridge(tensor: DTensor) -> None:
    """Join the graph of a custom Function that made this wrapper to that of the locals.

    Raises:
        UnsupportedError: something else than DTensors and plain leaves went into the Function.
    """
    # First, so that what is asked of the wrapper below does not come back here.
    tensor._may_have_hidden_node = False
    node = hidden_node(tensor)
    if node is None:
        if tensor._from_checkpoint and marked_to_want_gradients(tensor):
            tensor._local_tensor.requires_grad_()
        return
    nodes, sources = _hidden_graph(node, tensor)
    outputs = [tensor]
    for known in node.metadata.pop(_SIBLINGS, ()):
        sibling = known()
        if sibling is not None and sibling is not tensor and hidden_node(sibling) is node:
            outputs.append(sibling)
    # The locals that the Function computed have no history: its forward ran without grad.
    data = [output._local_tensor.detach() for output in outputs]
    specs = tuple(output._spec for output in outputs)
    # Cotangents come out of the hidden graph complete, as users see gradients: invariant uses.
    aliases = [local_for_use(s, 0) if isinstance(s, DTensor) else s for s in sources]
    graph = BridgedGraph(tuple(map(_released, outputs)), specs, sources, _saved(nodes))
    joined = _Bridge.apply(graph, len(data), *data, *aliases)  # type: ignore[no-untyped-call]
    for output, local in zip(outputs, joined, strict=True):
        output._local_tensor = local
        output._function_node = node
        output._may_have_hidden_node = False
        history_replaced(output)
        mirror_requires_grad(output, True)


def _released(output: DTensor) -> DTensor:
    """A holder of the output's node; the output itself is as if no Function had made it.

    Were the output held itself, it would hang in a cycle, and keep its memory.
    """
    # The holder takes the node over, and nobody else has it: so the graph keeps the holder, the
    # wrapper keeps the local, and nothing refers back.
    with torch.no_grad():
        holder = wrap(output._local_tensor.detach(), output._spec)
    return holder if swap_metadata(output, holder) else output


def _hidden_graph(node: Any, output: DTensor) -> tuple[list[Any], tuple[Tensor, ...]]:
    """The nodes of the hidden graph behind one of them, and the tensors in which it ends."""
    nodes, seen = [node], {id(node)}
    ends: dict[int, Tensor] = {}
    for current in nodes:
        # Functions chained without an op between them are one hidden graph, crossed at once.
        for after, _ in current.next_functions:
            variable = getattr(after, "variable", None)
            if variable is not None:
                ends[id(variable)] = variable
            elif isinstance(after, BackwardCFunction) or _is_of_torch(after):
                if id(after) not in seen:
                    seen.add(id(after))
                    nodes.append(after)
            elif after is not None:
                raise UnsupportedError(
                    f"{output!r} came out of a custom autograd.Function that was given a plain "
                    f"tensor besides, which another op had made ({after.name()}): its gradient "
                    "cannot be led back. Make it a DTensor, or a leaf; or call the Function on "
                    "x.to_local() and wrap its result with DTensor.from_local()."
                )
    return nodes, tuple(ends.values())


# What the engine itself makes where it adds gradients of second order, and what constructors that
# are given a tensor make: torch.as_tensor(x, dtype=…), torch.Tensor(x).
_TORCHS_OWN = frozenset({"AddBackward0", "ToCopyBackward0", "AliasBackward0"})


def _is_of_torch(node: Any) -> bool:
    """Whether torch made this node of the hidden graph; its backward runs on wrappers as well."""
    return node is not None and node.name() in _TORCHS_OWN


def _saved(nodes: list[Any]) -> tuple[tuple[Tensor, int], ...]:
    with _expect_gradients(()):
        tensors = [t for node in nodes for t in getattr(node, "saved_tensors", ())]
    return tuple(
        (t._local_tensor, t._local_tensor._version)
        for t in tensors
        if isinstance(t, DTensor) and not t._local_tensor.is_inference()
    )


def answer_below_overrides(func: Any, args: Any) -> DTensor | None:
    """What C++ needs of wrappers for a custom Function: aliases of what it saves, and sums.

    None where it is not for one.
    """
    recomputed = func is torch.ops.aten.detach.default and _recomputed()
    if recomputed or (func is torch.ops.aten.detach.default and (_running or _applied())):
        alias = wrap(args[0]._local_tensor.detach(), args[0]._spec)
        alias._may_have_hidden_node = True  # a saved output has the node of its Function
        if recomputed:
            alias._from_checkpoint = True  # C++ marks it, if gradients were wanted of the original
        return alias
    if func is torch.ops.aten.add.Tensor and _running and len(args) == 2:
        total: DTensor = args[0] + args[1]
        total._may_have_hidden_node = True
        return total
    return None


def _applied() -> bool:
    """Whether it is `Function.apply` that led to `__torch_dispatch__`."""
    return sys._getframe(3).f_code is torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _recomputed() -> bool:
    """Whether a checkpoint inside of another asks for an input that the outer one recomputed."""
    return sys._getframe(3).f_code.co_filename == checkpoint.__file__


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: BridgedGraph, count: int, *tensors: Tensor) -> Any:
        """Return the data of the outputs, now behind the aliases of the sources."""
        ctx.set_materialize_grads(False)
        ctx.crossing, ctx.count = graph, count
        return tuple(data.detach() for data in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Run the hidden graph with DTensors. Collective, as far as the Function's backward is."""
        holders, specs, sources, saved = ctx.crossing
        # C++ checks versions of the wrappers that it saved, which no op of ours changes.
        if any(local._version != version for local, version in saved):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a DTensor that a custom autograd.Function had saved"
            )
        roots, starts = [], []
        for holder, spec, cotangent in zip(holders, specs, cotangents, strict=True):
            if cotangent is not None:
                roots.append(holder)
                starts.append(as_gradient(cotangent, spec.layout, 0, spec.shape))
        with _expect_gradients(sources):
            found = engine_gradients(roots, starts, sources)
        returned = [_as_local_cotangent(g, s) for g, s in zip(found, sources, strict=True)]
        return (None, None, *(None,) * ctx.count, *returned)


def _as_local_cotangent(gradient: Tensor | None, source: Tensor) -> Tensor | None:
    if gradient is None:
        return None
    if not isinstance(source, DTensor):
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    layout = source._spec.layout
    if not isinstance(gradient, DTensor):
        gradient = as_replicated(gradient, layout.mesh)
    return as_cotangent(gradient, layout, 0)


@contextmanager
def _expect_gradients(sources: tuple[Tensor, ...]) -> Iterator[None]:
    """Gradients may arrive at these wrappers: somebody takes them on."""
    for source in sources:
        if isinstance(source, DTensor):
            local_outside_autograd(
                source
            )  # now, lest backward be the first to use it, and guard it
    guards = [
        s._stray_grad_guard
        for s in sources
        if isinstance(s, DTensor) and s._stray_grad_guard is not None
    ]
    for guard in guards:
        guard.expected += 1
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()
        for guard in guards:
            guard.expected -= 1
