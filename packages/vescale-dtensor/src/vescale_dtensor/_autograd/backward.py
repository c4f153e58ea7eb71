"""`torch.autograd.backward` and `grad` with DTensors among outputs and inputs.

Both run torch's engine on local tensors. An output starts with the local cotangent of its layout;
an input stands for all its aliases, whose cotangents are combined into one complete gradient.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from vescale_dtensor._autograd.conversion import as_replicated
from vescale_dtensor._autograd.hooks import _add_retained, retain_grad
from vescale_dtensor._autograd.local_use import join_hidden_node, leaf_gradient_of, local_for_use
from vescale_dtensor._autograd.user_gradients import as_cotangent, as_gradient
from vescale_dtensor._autograd.uses import (
    CotangentReduction,
    average_factor,
)
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.execution_events import end_step, record
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placements import Partial
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.worlds import cached


def cotangent_of(tensor: DTensor, value: Tensor | None) -> Tensor | None:
    """The local cotangent with which a backward from `tensor` starts.

    Args:
        tensor: an output.
        value: its gradient, of the same global shape; None: one, for an output of one element.

    Returns:
        A local tensor; None where torch itself starts with the same. Collective if `value` has to
        be redistributed.

    Raises:
        RuntimeError: no gradient for an output of several elements, or one of another shape.
        UnsupportedError: an output that is partial, but neither a sum nor an average.
    """
    layout = tensor._spec.layout
    # Errors below compare global shapes, so every rank raises them or none does.
    if value is None:
        if prod(tensor.shape) != 1:
            raise RuntimeError(
                "grad can be implicitly created only for scalar outputs; "
                f"this tensor has the shape {tuple(tensor.shape)}"
            )
        return start_of(layout, tensor._local_tensor)
    # Asked here as well: what is partial otherwise is refused with any gradient.
    _start_factor(layout)
    given = value if isinstance(value, DTensor) else as_replicated(value, layout.mesh)
    if given.shape != tensor.shape:
        # torch would compare local shapes: its message would name this rank's numbers, and
        # ranks whose local shapes agree would go on to collectives that the others miss.
        raise RuntimeError(
            f"Mismatch in shape: a gradient of the shape {list(given.shape)} was given for "
            f"an output of the shape {list(tensor.shape)}"
        )
    return as_cotangent(given, layout, 0)


def start_of(layout: Layout, local: Tensor) -> Tensor | None:
    """The local cotangent of an output of one element, which is one; None: torch's own start.

    Raises:
        UnsupportedError: the output is partial, but neither a sum nor an average.
    """
    factor = _start_factor(layout)
    # Not where this rank's shard is empty: there torch would refuse to make a start.
    if factor == 1 and local.numel() == 1:
        return None  # torch itself starts with a one
    start = torch.ones_like(local)
    return start if factor == 1 else start / factor


@cached(1024)
def _start_factor(layout: Layout) -> int:
    """Divisor of the start: the cotangent of each local tensor of an average of n is 1/n.

    Raises:
        UnsupportedError: a partial placement that is not linear in the local tensors.
    """
    for placement in layout.placements:
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise UnsupportedError(
                f"backward from a tensor that is {placement}: redistribute it to Replicate() first"
            )
    return average_factor(layout)


@cached(1024)
def _words(spec: Spec) -> str:
    """What is recorded of a backward. Text, since the log outlives the mesh that a spec holds."""
    return f"backward from {spec}"


def _listed(value: Any) -> list[Any]:
    """A list of what torch takes as None, a tensor, or a sequence."""
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else list(value)


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward` for any mix of DTensors and plain tensors.

    Takes and raises what torch's function does. Collective, as far as the graph is.
    """
    outputs = _listed(tensors)
    given = _listed(grad_tensors if grad_tensors is not None else grad_variables)
    given = given or [None] * len(outputs)
    roots, starts = _roots(outputs, given)
    if inputs is None:
        torch.autograd.backward(roots, starts, retain_graph=retain_graph, create_graph=create_graph)
        return
    input_aliases = [(source, _aliases_of_input(source)) for source in _listed(inputs)]
    targets = [local for _, aliases in input_aliases for _, local in aliases]
    # Of an activation, torch leaves a `.grad` on each alias, in the alias's own layout: those are
    # turned into one gradient of the wrapper. A leaf's `.grad` is where it belongs already.
    activations = [
        (source, aliases, source._rare.retained_grad)
        for source, aliases in input_aliases
        if isinstance(source, DTensor) and not source._local_tensor.is_leaf
    ]
    torch.autograd.backward(
        roots, starts, retain_graph=retain_graph, create_graph=create_graph, inputs=targets
    )
    for source, aliases, before in activations:
        _retain_from(source, aliases, before)


def _retain_from(
    source: DTensor, aliases: list[tuple[int, Tensor]], before: DTensor | None
) -> None:
    """Move the gradients that a backward left on an activation's aliases to the activation.

    Args:
        source: an activation that was an input of the backward.
        aliases: its aliases, each with the mask of its varying axes.
        before: its retained gradient before that backward.
    """
    found = [local.grad for _, local in aliases]
    for _, local in aliases:
        local.grad = None  # or the next backward would add to it
    # A hook of `retain_grad` on the local tensor has run and stored the gradient. One on the node
    # of the aliases has not: the engine stops at its outputs, and does not run the node.
    if source._rare.retained_grad is before:
        total = complete_gradient(source, tuple(mask for mask, _ in aliases), tuple(found))
        if total is not None:
            _add_retained(source, total)
    retain_grad(source)  # torch retains the gradient of such an input from then on


def tensor_backward(
    self: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`Tensor.backward`."""
    backward(self, gradient, retain_graph, create_graph, inputs=inputs)


def _roots(outputs: list[Any], given: list[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Local tensors to start a backward from, and their cotangents."""
    roots: list[Tensor] = []
    starts: list[Tensor | None] = []
    begun = None
    for output, start in zip(outputs, given, strict=True):
        if isinstance(output, DTensor):
            begun = output._spec.layout.mesh
            record(begun, _words(output._spec), output._lineage)
            # An invariant use: the start is complete wherever the output is replicated.
            roots.append(local_for_use(output, 0))
            starts.append(cotangent_of(output, start))
        else:
            roots.append(output)
            starts.append(start.full_tensor() if isinstance(start, DTensor) else start)
    if begun is not None:
        end_step(begun)
    return roots, starts


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` for any mix of DTensors and plain tensors.

    Computes the cotangent of every alias of an input, and combines them. Takes, returns and raises
    what torch's function does; the gradient of a DTensor is a DTensor. Collective.

    Raises:
        UnsupportedError: `is_grads_batched`, or a `GradientEdge` among the inputs.
    """
    if is_grads_batched:
        raise UnsupportedError(
            "autograd.grad(is_grads_batched=True) with DTensors: vmap cannot look into them. "
            "Call it once for each row of grad_outputs."
        )
    roots, starts = _roots(
        _listed(outputs), _listed(grad_outputs) or [None] * len(_listed(outputs))
    )
    input_aliases = [_aliases_of_input(i) for i in _listed(inputs)]
    flat = [local for aliases in input_aliases for _, local in aliases]
    # Unused aliases are normal, so an unused *input* is noticed below, when all are combined.
    found = iter(
        torch.autograd.grad(roots, flat, starts, retain_graph, create_graph, allow_unused=True)
    )
    results = []
    # In the order of `inputs` on every rank: combining communicates.
    for index, (source, aliases) in enumerate(zip(_listed(inputs), input_aliases, strict=True)):
        result = _gathered(source, [m for m, _ in aliases], [next(found) for _ in aliases])
        if result is None and materialize_grads:
            result = torch.zeros_like(source)
        if result is None and not allow_unused:
            raise RuntimeError(
                f"autograd.grad: input {index} does not appear in the graph; "
                "pass allow_unused=True if that is meant"
            )
        results.append(result)
    return tuple(results)


def _aliases_of_input(source: Any) -> list[tuple[int, Tensor]]:
    """The local tensors through which an input was used, each with its mask of varying axes.

    Raises:
        UnsupportedError: a `GradientEdge`.
    """
    if isinstance(source, GradientEdge):
        raise UnsupportedError(
            "autograd.grad of a GradientEdge beside DTensors: what crosses the edge is this rank's "
            "part of a gradient. Ask for the gradient of the tensor itself."
        )
    if not isinstance(source, DTensor):
        return [(0, source)]
    join_hidden_node(source)
    local = source._local_tensor
    aliases = source._use_aliases
    if (
        local.is_leaf
        or aliases is None
        or not aliases.is_current(local)
        or 0 not in aliases.by_mask
    ):
        # Aliases made of `local` itself are behind it in the graph: their node sends its cotangent
        # on to `local`, whose own is the complete one.
        return [(0, local)]
    # A redistribution made the aliases, `local` being one of them: they are siblings, and none
    # gets the cotangents of the others.
    return list(aliases.by_mask.items())


def _gathered(source: Any, masks: list[int], cotangents: list[Tensor | None]) -> Tensor | None:
    """The gradient of an input as the user sees it, from the cotangents of its aliases.

    Collective for an activation. A leaf's gradient stays partial where its contributions are.
    """
    if not isinstance(source, DTensor):
        return cotangents[0]
    layout = source._spec.layout
    if source._local_tensor.is_leaf:
        if cotangents[0] is None:
            return None
        owed = leaf_gradient_of(source).partial
        return as_gradient(cotangents[0], layout, owed, source.shape, of_leaf=True)
    return complete_gradient(source, tuple(masks), tuple(cotangents))


def complete_gradient(
    tensor: DTensor, masks: tuple[int, ...], cotangents: tuple[Tensor | None, ...]
) -> DTensor | None:
    """The complete gradient of a non-leaf from the cotangents of its aliases. Collective.

    None if no alias was used, which follows from the graph and is so on every rank.
    """
    if all(cotangent is None for cotangent in cotangents):
        return None
    layout = tensor._spec.layout
    local = CotangentReduction(layout, 0, layout).reduce(masks, cotangents, tuple(tensor.shape))
    return as_gradient(local, layout, 0, tensor.shape)
