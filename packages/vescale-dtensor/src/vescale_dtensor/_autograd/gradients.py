"""Everything that starts, reads or watches a backward pass, with DTensors in hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from vescale_dtensor._autograd.conversion import (
    as_replicated,
    face,
    join_hidden_node,
    leaf_of,
    redistributed,
)
from vescale_dtensor._autograd.cotangent import Move, Side, cotangent_layout, dual, moved
from vescale_dtensor._autograd.leaf_gradient import Leaf
from vescale_dtensor._autograd.uses import (
    Owed,
    average_factor,
    widened,
)
from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placements import Partial
from vescale_dtensor._tensor.dtensor import DTensor, wrap_as
from vescale_dtensor._torch.compat import (
    materialized,
    own_gradient,
)
from vescale_dtensor._torch.overridable import one_step


def gradient(tensor: DTensor) -> DTensor | None:
    """See `DTensor.grad`."""
    local = tensor._local_tensor
    leaf: Leaf | None = tensor._leaf
    # Optimizers ask several times a step for each parameter: the usual answer comes first.
    if leaf is not None and leaf.wrapper is not None and leaf.wrapper._local_tensor is local.grad:
        return leaf.wrapper
    if not local.is_leaf:
        retained: DTensor | None = tensor._retained
        return retained
    _refuse_stray_gradient(tensor)
    found = local.grad
    if found is None:
        return None
    if found.layout is not torch.strided:
        found = local.grad = materialized(found)  # sparse, and a DTensor is strided
    leaf = leaf_of(tensor)
    if found.requires_grad and leaf.layout.partial:
        # Recorded (create_graph), and whole where the tensor is a sum: to differentiate it again,
        # its uses have to be told apart from those of what is replicated.
        owed = 0 if leaf.settled else leaf.partial
        return as_gradient(found, leaf.layout, owed, tensor.shape, of_leaf=True)
    wrapper = leaf.wrapper = wrap_as(found, leaf.gradient_layout(), tensor.shape)
    wrapper._gradient_of = weakref.ref(leaf)
    return wrapper


def follow(gradient: DTensor, view: DTensor) -> DTensor:
    """Let a view of a gradient be retyped with it: its memory holds the total when that does."""
    leaf = None if gradient._gradient_of is None else gradient._gradient_of()
    if leaf is not None and view._gradient_of is None and view._copied_from is None:
        leaf.views.add(view)
        view._gradient_of = weakref.ref(leaf)
    return view


def _refuse_stray_gradient(tensor: DTensor) -> None:
    """Notice a gradient that a custom Function with plain results left on the wrapper itself."""
    if tensor.requires_grad and own_gradient(tensor) is not None:
        raise UnsupportedError(
            f"{tensor!r} went into a custom autograd.Function that returned plain tensors, and its "
            "gradient did not reach the local data. Call the Function on x.to_local()."
        )


def set_gradient(tensor: DTensor, value: Any) -> None:
    """Assign `.grad`: a DTensor of the same shape, brought to the tensor's layout, or None.

    Raises:
        LayoutError: a gradient of another shape.
        UnsupportedError: a plain tensor, whose layout is unknown.
    """
    local = tensor._local_tensor
    if value is None and not local.is_leaf:
        tensor._retained = None
        return
    leaf = leaf_of(tensor)
    if value is None:
        drop_gradient(local, leaf)
        return
    if not isinstance(value, DTensor):
        raise UnsupportedError(
            f"the gradient of {tensor!r} was set to a plain tensor, whose layout is unknown; "
            "wrap it with DTensor.from_local(..., mesh, placements) first"
        )
    if value.shape != tensor.shape:
        raise LayoutError(
            f"the gradient of {tensor!r} was set to a tensor of the shape {list(value.shape)}; "
            "give one of the same global shape"
        )
    if not local.is_leaf:
        tensor._retained = value
        return
    if value._gradient_of is not None and value._gradient_of() is leaf:
        local.grad = value._local_tensor
        return
    total = redistributed(value, cotangent_layout(tensor._spec.layout, 0))
    _put_gradient(local, leaf, total._local_tensor)


@one_step
def drop_gradient(local: Tensor, leaf: Leaf) -> None:
    """Set the gradient of a leaf to None."""
    local.grad, leaf.settled, leaf.wrapper = None, False, None


def drop_gradients(locals_: list[Tensor], leaves: list[Leaf]) -> None:
    """Set the gradients of many leaves to None."""
    for local, leaf in zip(locals_, leaves, strict=True):
        local.grad, leaf.settled, leaf.wrapper = None, False, None


@one_step
def _put_gradient(local: Tensor, leaf: Leaf, total: Tensor) -> None:
    local.grad = total
    leaf.replaced()


def cotangent_of(tensor: DTensor, value: Tensor | None) -> Tensor | None:
    """The local cotangent to start a backward with, from a global gradient or from nothing.

    None where torch finds the same by itself.
    """
    layout = tensor._spec.layout
    local = tensor._local_tensor
    factor = _start_factor(layout)
    if value is None:
        if prod(tensor.shape) != 1:
            raise RuntimeError(
                "grad can be implicitly created only for scalar outputs; "
                f"this tensor has the shape {tuple(tensor.shape)}"
            )
        if factor == 1 and local.numel() == 1:
            return None  # torch itself starts with a one
        start = torch.ones_like(local)
    else:
        given = value if isinstance(value, DTensor) else as_replicated(value, layout.mesh)
        if given.shape != tensor.shape:
            # Torch would compare pieces: in numbers of this rank, and not on every rank.
            raise RuntimeError(
                f"Mismatch in shape: a gradient of the shape {list(given.shape)} was given for "
                f"an output of the shape {list(tensor.shape)}"
            )
        return as_cotangent(given, layout, 0)
    return start if factor == 1 else start / factor


@lru_cache(maxsize=1024)
def _start_factor(layout: Layout) -> int:
    """What the cotangent of a tensor of this layout is divided by.

    Raises:
        UnsupportedError: a partial result that is not linear in its terms.
    """
    for placement in layout.placements:
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise UnsupportedError(
                f"backward from a tensor that is {placement}: redistribute it to Replicate() first"
            )
    return average_factor(layout)


def _listed(value: Any) -> list[Any]:
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
    """`torch.autograd.backward` for any mix of DTensors and plain tensors."""
    outputs = _listed(tensors)
    given = _listed(grad_tensors if grad_tensors is not None else grad_variables)
    given = given or [None] * len(outputs)
    roots, starts = _roots(outputs, given)
    if inputs is None:
        torch.autograd.backward(roots, starts, retain_graph=retain_graph, create_graph=create_graph)
        return
    asked = [(source, _faces_asked(source)) for source in _listed(inputs)]
    targets = [local for _, faces in asked for _, local in faces]
    activations = [
        (source, faces, source._retained)
        for source, faces in asked
        if isinstance(source, DTensor) and not source._local_tensor.is_leaf
    ]
    torch.autograd.backward(
        roots, starts, retain_graph=retain_graph, create_graph=create_graph, inputs=targets
    )
    for source, faces, before in activations:
        _retain_from(source, faces, before)


def _retain_from(source: DTensor, faces: list[tuple[int, Tensor]], before: DTensor | None) -> None:
    """Keep what a backward to an activation left on its faces, as torch keeps it from then on."""
    found = [local.grad for _, local in faces]
    for _, local in faces:
        local.grad = None
    # A hook that retains the gradient has run, unless it sits on the node that came after.
    if source._retained is before:
        total = complete(source, tuple(mask for mask, _ in faces), tuple(found))
        if total is not None:
            _keep(source, total)
    retain_grad(source)


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
    roots: list[Tensor] = []
    starts: list[Tensor | None] = []
    for output, start in zip(outputs, given, strict=True):
        if isinstance(output, DTensor):
            roots.append(face(output, 0))
            starts.append(cotangent_of(output, start))
        else:
            roots.append(output)
            starts.append(start.full_tensor() if isinstance(start, DTensor) else start)
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
    """`torch.autograd.grad`: asks for every face of an input and combines them."""
    if is_grads_batched:
        raise UnsupportedError(
            "autograd.grad(is_grads_batched=True) with DTensors: vmap cannot look into them. "
            "Call it once for each row of grad_outputs."
        )
    roots, starts = _roots(
        _listed(outputs), _listed(grad_outputs) or [None] * len(_listed(outputs))
    )
    asked = [_faces_asked(i) for i in _listed(inputs)]
    flat = [local for faces in asked for _, local in faces]
    found = iter(
        torch.autograd.grad(roots, flat, starts, retain_graph, create_graph, allow_unused=True)
    )
    results = []
    for index, (source, faces) in enumerate(zip(_listed(inputs), asked, strict=True)):
        result = _gathered(source, [m for m, _ in faces], [next(found) for _ in faces])
        if result is None and materialize_grads:
            result = torch.zeros_like(source)
        if result is None and not allow_unused:
            raise RuntimeError(
                f"autograd.grad: input {index} does not appear in the graph; "
                "pass allow_unused=True if that is meant"
            )
        results.append(result)
    return tuple(results)


def _faces_asked(source: Any) -> list[tuple[int, Tensor]]:
    if isinstance(source, GradientEdge):
        raise UnsupportedError(
            "autograd.grad of a GradientEdge beside DTensors: what crosses the edge is this rank's "
            "part of a gradient. Ask for the gradient of the tensor itself."
        )
    if not isinstance(source, DTensor):
        return [(0, source)]
    join_hidden_node(source)
    local = source._local_tensor
    faces = source._faces
    if local.is_leaf or faces is None or not faces.current(local) or 0 not in faces.by_mask:
        # A hub that only re-types `local` hands everything back to it.
        return [(0, local)]
    return list(faces.by_mask.items())


def _gathered(source: Any, masks: list[int], cotangents: list[Tensor | None]) -> Tensor | None:
    if not isinstance(source, DTensor):
        return cotangents[0]
    layout = source._spec.layout
    if source._local_tensor.is_leaf:
        if cotangents[0] is None:
            return None
        owed = leaf_of(source).partial
        return as_gradient(cotangents[0], layout, owed, source.shape, of_leaf=True)
    return complete(source, tuple(masks), tuple(cotangents))


def complete(
    tensor: DTensor, masks: tuple[int, ...], cotangents: tuple[Tensor | None, ...]
) -> DTensor | None:
    """The complete gradient of a non-leaf from those of its faces. Collective."""
    if all(cotangent is None for cotangent in cotangents):
        return None
    layout = tensor._spec.layout
    local = Owed(layout, 0, layout).settle(masks, cotangents, tuple(tensor.shape))
    return as_gradient(local, layout, 0, tensor.shape)


def as_gradient(
    local: Tensor, layout: Layout, varying: int, shape: Any, of_leaf: bool = False
) -> DTensor:
    """A local cotangent of a tensor of this layout, as the user sees it."""
    factor = 1 if of_leaf else average_factor(layout)
    if factor != 1:
        local = local * factor  # each term of an average has its part of the gradient
    side = dual(Side(layout, varying))
    usual = moved(materialized(local), Move(side, Side(side.layout, 0), tuple(shape)))
    return wrap_as(usual, side.layout, shape)


def as_cotangent(gradient: DTensor, layout: Layout, varying: int, of_leaf: bool = False) -> Tensor:
    """The user's gradient of a tensor of this layout, as autograd passes it on below."""
    side = dual(Side(layout, varying))
    placed = redistributed(gradient, side.layout)
    local = moved(placed._local_tensor, Move(Side(side.layout, 0), side, tuple(placed.shape)))
    factor = 1 if of_leaf else average_factor(layout)
    return local if factor == 1 else local / factor


Hook = Callable[[Any], Any]


def register_hook(tensor: DTensor, hook: Hook) -> Any:
    """`Tensor.register_hook`: the hook gets a DTensor, complete for an activation."""
    handle = _registered(tensor, hook)
    if tensor._keeper is not None:
        # What is retained is what all hooks have made of it, also those that come later.
        tensor._keeper.remove()
        tensor._keeper = _registered(tensor, _keeping(tensor))
    return handle


def _registered(tensor: DTensor, hook: Hook) -> Any:
    join_hidden_node(tensor)
    local = tensor._local_tensor
    if not local.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if local.is_leaf:
        leaf = leaf_of(tensor)
        return _hooked(local, _on_local(hook, tensor, lambda: leaf.partial, of_leaf=True))
    faces = tensor._faces
    if faces is None or not faces.current(local) or 0 not in faces.by_mask:
        return _hooked(local, _on_local(hook, tensor, lambda: 0))
    return _on_hub(hook, tensor, tuple(faces.by_mask))


def _hooked(local: Tensor, hook: Hook) -> Any:
    return local.register_hook(hook)  # type: ignore[no-untyped-call]


def _on_local(
    hook: Hook, tensor: DTensor, varying: Callable[[], int], of_leaf: bool = False
) -> Hook:
    layout, shape = tensor._spec.layout, tuple(tensor.shape)

    def called(cotangent: Tensor) -> Tensor | None:
        seen = as_gradient(cotangent, layout, varying(), shape, of_leaf)
        return _hook_result(hook(seen), layout, varying(), of_leaf)

    return called


def _on_hub(hook: Hook, tensor: DTensor, masks: tuple[int, ...]) -> Any:
    """Hook the node that made all faces: it alone sees the complete gradient."""
    layout, shape = tensor._spec.layout, tuple(tensor.shape)

    def called(cotangents: tuple[Tensor | None, ...]) -> Any:
        if all(cotangent is None for cotangent in cotangents):
            return None
        local = Owed(layout, 0, layout).settle(masks, cotangents, shape)
        replaced = _hook_result(hook(as_gradient(local, layout, 0, shape)), layout, 0)
        total = local if replaced is None else replaced
        return _in_one_face(layout, masks, cotangents, total, shape)

    return hooked_node(tensor._local_tensor, called)


@one_step
def hooked_node(local: Tensor, hook: Hook) -> Any:
    """Hook the node that made a local tensor."""
    node = local.grad_fn
    assert node is not None
    return node.register_prehook(hook)


def _in_one_face(
    layout: Layout,
    masks: tuple[int, ...],
    cotangents: tuple[Tensor | None, ...],
    total: Tensor,
    shape: Any,
) -> tuple[Tensor | None, ...]:
    """The cotangents of all faces, with the total in one that had any: torch allows no other."""
    chosen = next(i for i, c in enumerate(cotangents) if c is not None)
    carrier = widened(total, layout, 0, masks[chosen], shape)
    return tuple(carrier if i == chosen else None for i in range(len(masks)))


def _hook_result(result: Any, layout: Layout, varying: int, of_leaf: bool = False) -> Tensor | None:
    if result is None:
        return None
    if not isinstance(result, DTensor):
        raise UnsupportedError(
            f"a gradient hook of a DTensor returned a {type(result).__name__}; it has to return a "
            "DTensor, as it was given one, or None"
        )
    return as_cotangent(result, layout, varying, of_leaf)


def register_post_accumulate_grad_hook(tensor: DTensor, hook: Hook) -> Any:
    """`Tensor.register_post_accumulate_grad_hook`: called with the parameter itself."""
    held = weakref.ref(tensor)

    def called(_: Tensor) -> None:
        parameter = held()
        if parameter is not None:
            hook(parameter)

    local: Any = tensor._local_tensor
    return local.register_post_accumulate_grad_hook(called)


def retain_grad(tensor: DTensor) -> None:
    """`Tensor.retain_grad`: keeps the complete gradient of an activation."""
    join_hidden_node(tensor)
    if not tensor._local_tensor.requires_grad:
        raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
    if tensor._local_tensor.is_leaf or tensor._keeper is not None:
        return
    tensor._keeper = _registered(tensor, _keeping(tensor))


def _keeping(tensor: DTensor) -> Hook:
    held = weakref.ref(tensor)

    def keep(gradient: DTensor) -> None:
        kept = held()
        if kept is not None:
            _keep(kept, gradient)

    return keep


def _keep(tensor: DTensor, gradient: DTensor) -> None:
    """Add to the retained gradient, as torch does; in memory that no other gradient shares."""
    before = tensor._retained
    tensor._retained = gradient.clone() if before is None else before + gradient
