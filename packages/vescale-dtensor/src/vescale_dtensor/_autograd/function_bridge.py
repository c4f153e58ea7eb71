"""Connects custom autograd.Functions on DTensors to the graph of the local tensors.

`Function.apply` does not go through `__torch_function__`. C++ sees wrappers that require grad, and
gives the wrappers that the Function returns an autograd node. These nodes form a hidden graph on
wrappers, from which no gradient would reach the local tensors. At the first use of such an output a
bridge connects the two graphs: a node in the graph of local tensors whose backward runs the hidden
graph, with DTensors in and out.

So the backward of a Function gets DTensors, as its forward did, and so do hooks on its node, among
them the full backward hooks of modules.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from vescale_dtensor._autograd.conversion import as_replicated
from vescale_dtensor._autograd.grad_fn import LocalNode
from vescale_dtensor._autograd.local_use import local_for_use, local_outside_autograd
from vescale_dtensor._autograd.reentrant_checkpoint import (
    SHOWN,
    has_reentrant,
    reentrant_gradients,
)
from vescale_dtensor._autograd.user_gradients import as_cotangent, as_gradient
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.dtensor import DTensor, may_have_hidden_node, wrap
from vescale_dtensor._tensor.rare_state import rare_state
from vescale_dtensor._tensor.state import history_replaced
from vescale_dtensor._torch.compat import (
    apply_code,
    engine_gradients,
    forward_grad_enabled,
    hidden_node,
    marked_to_want_gradients,
    mirror_requires_grad,
    saved_tensor_hooks,
    swap_metadata,
)
from vescale_dtensor._torch.overridable import overridable

# Key in a hidden node's metadata: weak references to those of its outputs whose `grad_fn` was read.
_SIBLINGS = "vescale_dtensor.outputs"


class BridgedGraph(NamedTuple):
    """What the backward of a bridge needs.

    Attributes:
        nodes: all nodes of the hidden graph.
        holders: wrappers that own the hidden node, one for each output; only the bridge has them.
        specs: the outputs' specs; None for a plain tensor.
        sources: the tensors in which the hidden graph ends: wrappers, and plain leaves.
        saved: local tensors of what the Function saved, each with its version; C++ checks the
            version counters of the wrappers only.
    """

    nodes: tuple[Any, ...]
    holders: tuple[Tensor, ...]
    specs: tuple[Spec | None, ...]
    sources: tuple[Tensor, ...]
    saved: tuple[tuple[Tensor, int], ...]


# One entry per hidden graph that is running, in any thread. Not thread-local: on CUDA, backward
# runs in threads of torch's own. A list, since appending and popping are atomic.
_running: list[None] = []


def node_of(tensor: DTensor) -> Any:
    """See `DTensor.grad_fn`: a Function's own node, or a stand-in for the local tensor's."""
    if may_have_hidden_node(tensor):
        node = hidden_node(tensor)
        if node is not None:
            # Code that reads `grad_fn` may hook the node (modules do), and a hook has to get the
            # cotangents of all outputs at once, so outputs noted here are bridged together.
            node.metadata[SHOWN] = True
            filed = node.metadata.setdefault(_SIBLINGS, [])
            if all(known() is not tensor for known in filed):
                filed.append(weakref.ref(tensor))
            return node
    if tensor._rare.function_node is not None:
        tensor._rare.function_node.metadata[SHOWN] = True
        return tensor._rare.function_node
    local = tensor._local_tensor.grad_fn
    return None if local is None else LocalNode(local)


def is_leaf(tensor: DTensor) -> bool:
    """See `DTensor.is_leaf`: false also for a Function's output that is not bridged yet."""
    leaf: bool = tensor._local_tensor.is_leaf
    return leaf and not (may_have_hidden_node(tensor) and hidden_node(tensor) is not None)


def wants_gradient(tensor: DTensor) -> bool:
    """See `DTensor.requires_grad`, for a tensor that a custom Function may have made."""
    if tensor._local_tensor.requires_grad or hidden_node(tensor) is not None:
        return True
    return tensor._rare.from_checkpoint and marked_to_want_gradients(tensor)


def bridge(tensor: DTensor) -> None:
    """Connect the hidden graph behind a wrapper, if there is one, to the graph of local tensors.

    Afterwards the output's local tensor is one with history, as if an op had made it.

    Raises:
        UnsupportedError: something else than DTensors and plain leaves went into the Function.
    """
    # First: the calls below use the wrapper, and would come back here.
    tensor._may_have_hidden_node = False
    node = hidden_node(tensor)
    if node is None:
        # In a forward that enables grad, the Function may still return it and give it a node.
        tensor._may_have_hidden_node = not forward_grad_enabled()
        if tensor._rare.from_checkpoint and marked_to_want_gradients(tensor):
            tensor._local_tensor.requires_grad_()
        return
    joined_local(tensor)


# Overridable, so that capture records it as one call: a mode sees no custom autograd nodes.
@overridable
def joined_local(tensor: DTensor) -> Tensor:
    """Connect the hidden graph behind a wrapper to that of local tensors; its new local tensor.

    Raises:
        UnsupportedError: see `bridge`.
    """
    tensor._may_have_hidden_node = False
    node = hidden_node(tensor)
    if node is None:
        return tensor._local_tensor
    outputs = [tensor]
    # A sibling that was bridged since, or has another history, has not this node any more.
    for known in node.metadata.pop(_SIBLINGS, ()):
        sibling = known()
        if sibling is not None and sibling is not tensor and hidden_node(sibling) is node:
            outputs.append(sibling)
    join_results(node, outputs)
    return tensor._local_tensor


def join_results(node: Any, results: Sequence[Tensor], plain: Sequence[Tensor] = ()) -> None:
    """Connect the hidden graph behind outputs of one Function to the graph of local tensors.

    Args:
        node: the Function's.
        results: DTensors; or plain tensors, which are the same on every rank.
        plain: plain tensors that are known to have gone into the Function.

    Raises:
        UnsupportedError: other plain tensors that want gradients went into it.
    """
    nodes, sources = _hidden_graph(node, results[0], plain)
    # Without history, as the Function's forward ran without grad.
    data = [t._local_tensor.detach() if isinstance(t, DTensor) else t.detach() for t in results]
    specs = tuple(t._spec if isinstance(t, DTensor) else None for t in results)
    # Invariant uses: cotangents come out of the hidden graph complete, as users see gradients.
    aliases = [local_for_use(s, 0) if isinstance(s, DTensor) else s for s in sources]
    holders = tuple(map(_released, results))
    graph = BridgedGraph(tuple(nodes), holders, specs, sources, _saved(nodes))
    joined = _Bridge.apply(graph, len(data), *data, *aliases)  # type: ignore[no-untyped-call]
    for result, local in zip(results, joined, strict=True):
        if isinstance(result, DTensor):
            _take_local(result, local, node)
        elif not swap_metadata(result, local):  # the caller's tensor object gets the new history
            raise UnsupportedError(_NOT_OURS)


def _take_local(output: DTensor, local: Tensor, node: Any) -> None:
    # From here on autograd works on the new local, and the wrapper's node is shown only.
    output._local_tensor = local
    rare_state(output).function_node = node
    output._may_have_hidden_node = False
    history_replaced(output)
    # C++ sees a tensor without a node now. With this flag the next Function notices it.
    mirror_requires_grad(output, True)


_NOT_OURS = (
    "a custom autograd.Function was given DTensors, and a plain tensor that it returned is held "
    "by torch itself: a gradient cannot be led through it. Return a new tensor, or call the "
    "Function on x.to_local() and wrap its result with DTensor.from_local()."
)


def _released(output: Tensor) -> Tensor:
    """Move an output's hidden node to a new tensor, which is returned.

    If the bridge referred to the output itself, there would be a cycle: the output owns its new
    local tensor, whose node is the bridge. As it is, graph -> holder -> hidden node is one chain,
    and output -> local tensor -> graph another.

    Where C++ had saved the output, it hands out the holder from then on (a checkpoint that runs its
    part again), and that may be used, too. It keeps its node, which two bridges then lead to.
    """
    is_holder = isinstance(output, DTensor) and output._rare.holds_node
    if is_holder:
        return output
    with torch.no_grad():
        if isinstance(output, DTensor):
            holder: Any = wrap(output._local_tensor.detach(), output._spec)
            # While `apply` has not returned, it is the holder that the caller gets of a tensor that
            # the Function has written to.
            holder._may_have_hidden_node = rare_state(holder).holds_node = True
        else:
            holder = output.detach()
    # Where C++ refuses the swap (it holds one of the two), a cycle is the lesser evil: the garbage
    # collector frees it.
    return holder if swap_metadata(output, holder) else output


def _hidden_graph(
    node: Any, output: Tensor, plain: Sequence[Tensor]
) -> tuple[list[Any], tuple[Tensor, ...]]:
    """The nodes of a hidden graph from `node` on, and the tensors in which it ends.

    Raises:
        UnsupportedError: it runs into the graph of plain tensors.
    """
    nodes, seen = [node], {id(node)}
    ends: dict[int, Tensor] = {}
    known = {(t.grad_fn, t.output_nr): t for t in plain if t.grad_fn is not None}
    for current in nodes:  # which grows: Functions chained without an op between share one graph
        for after, place in current.next_functions:
            # Only AccumulateGrad nodes have one: of plain leaves, and of wrappers, which are leaves
            # to C++.
            variable = known.get((after, place), getattr(after, "variable", None))
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


# Nodes that C++ makes on wrappers without asking `__torch_function__`: by the engine, where it adds
# gradients of second order, and by constructors: torch.as_tensor(x, dtype=…), torch.Tensor(x).
_TORCHS_OWN = frozenset({"AddBackward0", "ToCopyBackward0", "AliasBackward0"})


def _is_of_torch(node: Any) -> bool:
    """Whether torch itself made this node of the hidden graph; its backward takes wrappers too."""
    return node is not None and node.name() in _TORCHS_OWN


def _saved(nodes: list[Any]) -> tuple[tuple[Tensor, int], ...]:
    """Local tensors of the DTensors that Functions have saved, with their present versions."""
    # A checkpoint would run its part again to hand them out, and torch counts no versions there.
    if saved_tensor_hooks() is not None:
        return ()
    # Unpacking a saved tensor makes an alias of it: see `answer_below_overrides`. Tensors made in
    # inference mode have no version counter.
    with _expect_gradients(()):
        tensors = [t for node in nodes for t in getattr(node, "saved_tensors", ())]
    return tuple(
        (t._local_tensor, t._local_tensor._version)
        for t in tensors
        if isinstance(t, DTensor) and not t._local_tensor.is_inference()
    )


def answer_below_overrides(func: Any, args: Any) -> DTensor | None:
    """Answer calls that C++ makes on wrappers for a custom Function: aliases and sums.

    These calls arrive at `__torch_dispatch__`, below `__torch_function__`.

    Args:
        func: an operator overload.
        args: its arguments; the first is a DTensor.

    Returns:
        The result; None if the call is not for a custom Function or a checkpoint.
    """
    # A checkpoint detaches its inputs, also while no hidden graph runs.
    recomputed = func is torch.ops.aten.detach.default and _recomputed()
    if recomputed or (func is torch.ops.aten.detach.default and (_running or _applied())):
        alias = wrap(args[0]._local_tensor.detach(), args[0]._spec)
        # C++ gives an output that its Function saved the Function's node.
        alias._may_have_hidden_node = True
        if recomputed:
            # C++ marks it, if gradients were wanted of the original.
            rare_state(alias).from_checkpoint = True
        return alias
    # The engine adds the cotangents of a wrapper that was used twice in the hidden graph.
    if func is torch.ops.aten.add.Tensor and _running and len(args) == 2:
        total: DTensor = args[0] + args[1]
        total._may_have_hidden_node = True
        return total
    return None


def _applied() -> bool:
    """Whether `Function.apply` led to `__torch_dispatch__`.

    Only the stack shows it: frame 3 is the caller of `__torch_dispatch__`. From torch 2.14 on
    `apply` is C and leaves no frame; the aliases that constructors get serve there as well.
    """
    return apply_code is not None and sys._getframe(3).f_code is apply_code


def _recomputed() -> bool:
    """Whether a nested checkpoint detaches an input that the outer one has recomputed."""
    return sys._getframe(3).f_code.co_filename == checkpoint.__file__


class _Bridge(torch.autograd.Function):
    """The node in the graph of local tensors whose backward runs a hidden graph."""

    @staticmethod
    def forward(ctx: Any, graph: BridgedGraph, count: int, *tensors: Tensor) -> Any:
        """Return the data of the `count` outputs; the other tensors are the sources' aliases."""
        # An output without uses then has None for a cotangent, and is no root of the hidden graph.
        ctx.set_materialize_grads(False)
        ctx.crossing, ctx.count = graph, count
        return tuple(data.detach() for data in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Run the hidden graph with DTensors. Collective, as far as the Function's backward is.

        Raises:
            RuntimeError: a saved DTensor was written to since.
        """
        nodes, holders, specs, sources, saved = ctx.crossing
        # In-place ops of ours change versions of local tensors only, so C++ would not notice.
        if any(local._version != version for local, version in saved):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a DTensor that a custom autograd.Function had saved"
            )
        roots, starts = [], []
        for holder, spec, cotangent in zip(holders, specs, cotangents, strict=True):
            if cotangent is not None:
                roots.append(holder)
                starts.append(
                    cotangent
                    if spec is None
                    else as_gradient(cotangent, spec.layout, 0, spec.shape)
                )
        with _expect_gradients(sources):
            if has_reentrant(nodes):
                found = reentrant_gradients(nodes, roots, starts, sources)
            else:
                found = engine_gradients(roots, starts, sources)
        returned = [_as_local_cotangent(g, s) for g, s in zip(found, sources, strict=True)]
        return (None, None, *(None,) * ctx.count, *returned)


def _as_local_cotangent(gradient: Tensor | None, source: Tensor) -> Tensor | None:
    """What the hidden graph gave for a source, as the cotangent of its alias. Collective."""
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
    """Let gradients arrive at these wrappers: the guards against stray ones expect them."""
    # Make the guards now. One that a use inside the hidden backward made would not be among those
    # that expect a gradient.
    for source in sources:
        if isinstance(source, DTensor):
            local_outside_autograd(source)
    guards = [
        s._stray_grad_guard
        for s in sources
        if isinstance(s, DTensor) and s._stray_grad_guard is not None
    ]
    for guard in guards:
        guard.expected += 1  # a count: hidden backwards may nest
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()
        for guard in guards:
            guard.expected -= 1
