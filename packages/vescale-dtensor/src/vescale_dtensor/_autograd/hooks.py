"""Hooks on gradients and `retain_grad`: hooks are called with DTensors.

The hook of an activation gets its complete gradient. The hook of a leaf gets what torch's does, the
cotangent about to be accumulated: a DTensor that is partial where the leaf's contributions are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from vescale_dtensor._autograd.local_use import join_hidden_node, leaf_gradient_of
from vescale_dtensor._autograd.user_gradients import as_cotangent, as_gradient
from vescale_dtensor._autograd.uses import (
    CotangentReduction,
    as_partial,
)
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.rare_state import rare_state
from vescale_dtensor._torch.overridable import overridable

Hook = Callable[[Any], Any]


def register_hook(tensor: DTensor, hook: Hook) -> Any:
    """`Tensor.register_hook`; the hook gets and may return a DTensor.

    Raises:
        RuntimeError: the tensor does not require a gradient.
    """
    handle = _registered(tensor, hook)
    if tensor._rare.retain_grad_hook is not None:
        # torch retains what all hooks have made of the gradient, also those registered later, so
        # the retaining hook has to stay the last one.
        tensor._rare.retain_grad_hook.remove()
        rare_state(tensor).retain_grad_hook = _registered(tensor, _retain_hook(tensor))
    return handle


def _registered(tensor: DTensor, hook: Hook) -> Any:
    """Register a hook where the tensor's complete gradient passes; returns torch's handle."""
    join_hidden_node(tensor)
    local = tensor._local_tensor
    if not local.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if local.is_leaf:
        # Uses noted after this may make further axes partial, so the mask is read when called.
        # The local tensor holds the hook, so the hook must not hold the leaf, which holds it.
        partial = leaf_gradient_of(tensor).noted
        return _hooked(local, _on_local(hook, tensor, lambda: partial.mask, of_leaf=True))
    # Aliases made of `local` send their cotangents through it. Where a redistribution made them
    # all, `local` is one among siblings, and only their node sees every cotangent.
    aliases = tensor._use_aliases
    if aliases is None or not aliases.is_current(local) or 0 not in aliases.by_mask:
        return _hooked(local, _on_local(hook, tensor, lambda: 0))
    return _on_shared_use_node(hook, tensor, tuple(aliases.by_mask))


def _hooked(local: Tensor, hook: Hook) -> Any:
    return local.register_hook(hook)  # type: ignore[no-untyped-call]


def _on_local(
    hook: Hook, tensor: DTensor, varying: Callable[[], int], of_leaf: bool = False
) -> Hook:
    """The hook of a user as one for the local tensor."""
    # Layout and shape, not the wrapper: autograd would keep it alive, in a cycle.
    layout, shape = tensor._spec.layout, tuple(tensor.shape)

    def called(cotangent: Tensor | None) -> Tensor | None:
        # Nothing came: what is accumulated elsewhere, as without a reduction under `no_sync`, comes
        # with a later backward, as a sum.
        if cotangent is None:
            return None
        seen = as_gradient(cotangent, layout, varying(), shape, of_leaf)
        return _hook_result(hook(seen), layout, varying(), of_leaf)

    return called


def _on_shared_use_node(hook: Hook, tensor: DTensor, masks: tuple[int, ...]) -> Any:
    """Hook the node that made all aliases: only there do all their cotangents meet.

    Args:
        hook: a hook of the user.
        tensor: an activation that a redistribution made.
        masks: the varying axes of each output of the node.
    """
    layout, shape = tensor._spec.layout, tuple(tensor.shape)

    def called(cotangents: tuple[Tensor | None, ...]) -> Any:
        if all(cotangent is None for cotangent in cotangents):
            return None
        local = CotangentReduction(layout, 0, layout).reduce(masks, cotangents, shape)
        replaced = _hook_result(hook(as_gradient(local, layout, 0, shape)), layout, 0)
        total = local if replaced is None else replaced
        return _in_one_alias(layout, masks, cotangents, total, shape)

    return hooked_node(tensor._local_tensor, called)


@overridable
def hooked_node(local: Tensor, hook: Hook) -> Any:
    """Register a hook that runs before the node that made a local tensor; returns its handle."""
    node = local.grad_fn
    assert node is not None
    return node.register_prehook(hook)


def _in_one_alias(
    layout: Layout,
    masks: tuple[int, ...],
    cotangents: tuple[Tensor | None, ...],
    total: Tensor,
    shape: Any,
) -> tuple[Tensor | None, ...]:
    """The cotangents of all aliases: one is the total, the others are None."""
    # torch does not let a hook replace None by a tensor, so one that had a cotangent carries it.
    chosen = next(i for i, c in enumerate(cotangents) if c is not None)
    carrier = as_partial(total, layout, 0, masks[chosen], shape)
    return tuple(carrier if i == chosen else None for i in range(len(masks)))


def _hook_result(result: Any, layout: Layout, varying: int, of_leaf: bool = False) -> Tensor | None:
    """What a user's hook returned, as a local cotangent; None: it changes nothing.

    Raises:
        UnsupportedError: something else than a DTensor, whose layout would be unknown.
    """
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
    # Weak: the local tensor owns the hook, and the wrapper owns the local tensor.
    tensor_ref = weakref.ref(tensor)

    def called(_: Tensor) -> None:
        parameter = tensor_ref()
        if parameter is not None:
            hook(parameter)

    local: Any = tensor._local_tensor
    return local.register_post_accumulate_grad_hook(called)


def retain_grad(tensor: DTensor) -> None:
    """`Tensor.retain_grad`: keeps the complete gradient of an activation. Does nothing for a leaf.

    Raises:
        RuntimeError: the tensor does not require a gradient.
    """
    join_hidden_node(tensor)
    if not tensor._local_tensor.requires_grad:
        raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
    if tensor._local_tensor.is_leaf or tensor._rare.retain_grad_hook is not None:
        return
    rare_state(tensor).retain_grad_hook = _registered(tensor, _retain_hook(tensor))


def _retain_hook(tensor: DTensor) -> Hook:
    """A hook that adds the gradient to what the tensor retains."""
    # Weak, as the graph that owns the hook is part of the tensor.
    tensor_ref = weakref.ref(tensor)

    def keep(gradient: DTensor) -> None:
        kept = tensor_ref()
        if kept is not None:
            _add_retained(kept, gradient)

    return keep


def _add_retained(tensor: DTensor, gradient: DTensor) -> None:
    """Add to the retained gradient, as torch does."""
    # A clone: autograd may hand the same memory to other nodes, and users may write to this.
    before = tensor._rare.retained_grad
    rare_state(tensor).retained_grad = gradient.clone() if before is None else before + gradient
