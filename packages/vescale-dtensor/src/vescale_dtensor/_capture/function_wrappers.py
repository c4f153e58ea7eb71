"""DTensors that custom autograd.Functions are given, and return, as values of a program.

All other steps of a program work on local tensors. A Function of the user's works on DTensors, in
its forward as in its backward, so a replay makes DTensors for it: of the local tensors of its own
steps, with the caches that uses before have left on them, since these decide what is communicated.
A leaf that wants a gradient is given itself. What the Function returns stays a DTensor, with the
node that C++ gave it, until an op uses it: where eager mode joins that node to the local tensors,
the program has a step that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from vescale_dtensor._capture.graph import InputSource, TracedGraph
from vescale_dtensor._capture.outputs import Make, plan_wrapper
from vescale_dtensor._capture.unsupported import refused
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import hidden_node


def wrapped_anew(make: Make, *results: Tensor) -> Any:
    """A DTensor of local tensors; a step of programs."""
    return make([], results)


def leaf_itself(wrapper: DTensor, local: Tensor) -> DTensor:
    """A leaf; a step of programs. Its local tensor is what guards know it by."""
    return wrapper


def local_of(wrapper: DTensor) -> Tensor:
    """The local tensor of what a custom Function returned; a step of programs."""
    return wrapper._local_tensor


def given_nodes(arguments: Sequence[Any], trace: TracedGraph) -> list[Any]:
    """The arguments of a custom Function, with a node for each DTensor.

    Raises:
        CaptureError: a replay could not give it the like.
    """
    ours = [value for value in arguments if isinstance(value, DTensor)]
    chained = any(_is_awaited(value) for value in ours)
    for value in ours:
        if chained and id(value) in trace.given and not _is_awaited(value):
            # Eager mode adds up what the two send back before it goes on; see `function_bridge`.
            raise refused(
                "a custom autograd.Function is given the result of another one, and a DTensor that "
                "the other one was given, too. Use the result in an op between the two"
            )
    return [_given(v, trace) if isinstance(v, DTensor) else v for v in arguments]


def _is_awaited(wrapper: DTensor) -> bool:
    """Whether a custom Function has made a DTensor, and no op has used it yet."""
    return hidden_node(wrapper) is not None


def _given(wrapper: DTensor, trace: TracedGraph) -> fx.Node:
    """The node of one DTensor that a custom Function is given."""
    made = trace.wrapper_node(wrapper)
    if _is_awaited(wrapper):
        if made is None:
            raise refused(
                "a custom autograd.Function is given what another one has returned outside. Use "
                "the result in an op before"
            )
        return made
    trace.given[id(wrapper)] = wrapper
    local = wrapper._local_tensor
    node = trace.node_of(local)
    if not (local.requires_grad and local.is_leaf):
        # Not the object itself: what earlier steps have left on it, a replay leaves on none.
        results: list[fx.Node] = []
        make = plan_wrapper(wrapper, trace, results)
        constant = trace.constant(make, check=False)
        return trace.graph.call_function(wrapped_anew, (constant, *results))
    return trace.graph.call_function(leaf_itself, (_leaf(wrapper, node, trace), node))


def _leaf(wrapper: DTensor, local: fx.Node, trace: TracedGraph) -> fx.Node:
    """The node of a leaf from outside, whose gradient state belongs to the object."""
    source = trace.sources.get(local)
    if source is None:
        raise refused(
            "a custom autograd.Function is given a leaf that the function makes (detach(), then "
            "requires_grad_()). Pass it as an argument"
        )
    index = source.index
    if index is None:
        return trace.constant(wrapper, check=False)
    name = f"argument_{index}_itself"
    return trace.placeholder(InputSource(lambda flat: flat[index], name, index=index))
