"""The local tensor for a use of a wrapper, recorded by autograd or not."""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_dtensor._autograd.eager_steps import run_steps_eagerly
from vescale_dtensor._autograd.leaf_gradient import LeafGradient, leaf_for_use
from vescale_dtensor._autograd.uses import (
    UseAliases,
    fork_local,
)
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import hook_own_gradient


def leaf_gradient_of(tensor: DTensor) -> LeafGradient:
    """The gradient state of a leaf wrapper, made at its first use."""
    leaf: LeafGradient | None = tensor._leaf_gradient
    if leaf is None or leaf.local() is not tensor._local_tensor:
        run_steps_eagerly()
        leaf = tensor._leaf_gradient = LeafGradient(tensor._local_tensor, tensor._spec.layout)
    return leaf


def local_for_use(tensor: DTensor, varying: int) -> Tensor:
    """The local data as an op uses it that varies on the axes of the mask `varying`.

    Args:
        tensor: the tensor used.
        varying: mask of replicated, active axes on which the op varies.
    """
    if not torch.is_grad_enabled():
        return local_outside_autograd(tensor)
    join_hidden_node(tensor)
    return recorded_local(tensor, varying)


def recorded_local(tensor: DTensor, varying: int) -> Tensor:
    """`local_for_use` in grad mode, of a tensor that is known to have no node of its own."""
    local = tensor._local_tensor
    if not local.requires_grad:
        return local
    # A leaf needs no shared-use node: torch accumulates its contributions in `.grad`, and what is
    # partial is reduced when `.grad` is read by an operation that needs the total.
    if local.is_leaf:
        leaf = leaf_gradient_of(tensor)
        noted = not varying & ~leaf.partial and not leaf.layout.replicated & ~varying
        if noted and leaf.average == 1:
            return local  # what `leaf_for_use` comes to when it has nothing to note
        return leaf_for_use(leaf, local, varying, tuple(tensor._spec.shape))
    if not varying:
        return local
    aliases: UseAliases | None = tensor._use_aliases
    # One node for all varying uses, so that backward communicates once for all of them. It is
    # dropped when the local tensor, its version, or the grad mode is another.
    if aliases is None or not aliases.is_current(local):
        aliases = tensor._use_aliases = fork_local(
            local, tensor._spec.layout, tensor._spec.shape, varying
        )
    known = aliases.by_mask.get(varying)
    if known is None:
        more = fork_local(local, tensor._spec.layout, tensor._spec.shape, varying)
        known = aliases.by_mask[varying] = more.by_mask[varying]
    return known


def join_hidden_node(tensor: DTensor) -> None:
    """Notice what a custom autograd.Function returned: its node hangs on the wrapper.

    See `function_bridge`.

    Raises:
        UnsupportedError: the Function had inputs that no bridge leads to.
    """
    if tensor._may_have_hidden_node:
        tensor._attach_function_node()


def local_outside_autograd(tensor: DTensor) -> Tensor:
    """The local data, for a use that autograd does not record.

    The forward of a custom autograd.Function is such a use. What it returns as a plain tensor hangs
    on the wrapper and not on the local, so the gradient would end there, unseen. No other way leads
    a gradient to a wrapper, so its arrival is made an error, at the first use without grad.
    """
    local = tensor._local_tensor
    if local.requires_grad and tensor._stray_grad_guard is None:
        tensor._stray_grad_guard = StrayGradientGuard(repr(tensor))
        hook_own_gradient(tensor, tensor._stray_grad_guard)
    return local


class StrayGradientGuard:
    """Refuses a gradient that arrives at a wrapper, unless a bridge waits for it (`expected`)."""

    __slots__ = ("expected", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.expected = 0

    def __call__(self, _: Tensor) -> None:
        """The hook on the wrapper."""
        if not self.expected:
            raise UnsupportedError(
                f"{self.what} went into a custom autograd.Function that returned plain tensors: "
                "its gradient would not reach the local data. Call the Function on x.to_local()."
            )
