"""The local tensor for a use of a wrapper: every op gets its operands' local data through here.

`local_for_use` and `recorded_local` choose between the local tensor itself and an alias of it,
depending on the axes on which the op varies, so that its cotangent arrives with a known layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_dtensor._autograd.eager_steps import run_steps_eagerly
from vescale_dtensor._autograd.leaf_gradient import LeafGradient
from vescale_dtensor._autograd.leaf_references import LeafHolds
from vescale_dtensor._autograd.leaf_use import leaf_for_use
from vescale_dtensor._autograd.uses import (
    UseAliases,
    fork_local,
)
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import any_requires_grad, hook_own_gradient


def leaf_gradient_of(tensor: DTensor) -> LeafGradient:
    """The gradient state of a leaf wrapper, made at its first use."""
    leaf: LeafGradient | None = tensor._leaf_gradient
    # Another local tensor is another leaf: what is known of the old one's `.grad` is void.
    if leaf is None or leaf.local is not tensor._local_tensor:
        run_steps_eagerly()
        holds = tensor._leaf_holds = LeafHolds(tensor._leaf_holds)
        layout = tensor._spec.layout
        leaf = tensor._leaf_gradient = LeafGradient(tensor._local_tensor, layout, holds)
    return leaf


def local_for_use(tensor: DTensor, varying: int) -> Tensor:
    """The local tensor, or an alias of it, for an op that varies on the axes in `varying`.

    Args:
        tensor: the tensor used.
        varying: mask of the axes on which the tensor is replicated, which have more than one
            coordinate, and on which the op varies.

    Raises:
        UnsupportedError: a custom autograd.Function made the tensor, and had inputs that its
            gradient cannot be led back to.
    """
    if not torch.is_grad_enabled():
        return local_outside_autograd(tensor)
    join_hidden_node(tensor)
    return recorded_local(tensor, varying)


def recorded_local(tensor: DTensor, varying: int) -> Tensor:
    """`local_for_use` in grad mode, for a tensor known to have no hidden node (see below)."""
    local = tensor._local_tensor
    if not local.requires_grad:
        return local
    # A leaf needs no shared-use node: torch accumulates its contributions in `.grad`, which is
    # reduced when an operation needs the total.
    if local.is_leaf:
        leaf = leaf_gradient_of(tensor)
        noted = not varying & ~leaf.partial and not leaf.layout.replicated & ~varying
        # The same result as `leaf_for_use` has where there is nothing to note, without its look
        # at modes: every op on a parameter comes through here.
        if noted and leaf.average == 1:
            return local
        return leaf_for_use(leaf, local, varying, tuple(tensor._spec.shape))
    if not varying:
        return local
    aliases: UseAliases | None = tensor._use_aliases
    # One node for all varying uses, so that backward communicates once for all of them. Aliases
    # of data that was replaced or written to since would miss that in their history.
    if aliases is None or not aliases.is_current(local):
        aliases = tensor._use_aliases = fork_local(
            local, tensor._spec.layout, tensor._spec.shape, varying
        )
    known = aliases.by_mask.get(varying)
    return _alias_apart(tensor, aliases, varying) if known is None else known


def _alias_apart(tensor: DTensor, aliases: UseAliases, varying: int) -> Tensor:
    """An alias for more varying axes than a node makes them for (`uses._MOST_SHARED_AXES`)."""
    known = aliases.apart.get(varying)
    if known is None:
        more = fork_local(tensor._local_tensor, tensor._spec.layout, tensor._spec.shape, varying)
        known = aliases.apart[varying] = more.by_mask[varying]
    return known


def join_hidden_node(tensor: DTensor) -> None:
    """Connect the local tensor to the node that a custom autograd.Function gave the wrapper.

    Does nothing for wrappers without such a node; see `function_bridge`.

    Raises:
        UnsupportedError: the Function had inputs to which no gradient can be led back.
    """
    # `may_have_hidden_node` written out: the first call of every op comes here for each operand.
    if tensor._may_have_hidden_node or (
        not tensor._local_tensor.requires_grad and any_requires_grad(tensor)
    ):
        tensor._attach_function_node()


def local_outside_autograd(tensor: DTensor) -> Tensor:
    """The local data, for a use that autograd does not record.

    The forward of a custom autograd.Function is such a use. If it returns a plain tensor, C++
    connects that to the wrapper and not to the local tensor, so its gradient would end at the
    wrapper, unseen. Nothing else leads a gradient there, so its arrival is made an error.
    """
    local = tensor._local_tensor
    # Only here, at the first use without grad: a hook on every wrapper would cost every op.
    if local.requires_grad and tensor._stray_grad_guard is None:
        tensor._stray_grad_guard = StrayGradientGuard(repr(tensor))
        hook_own_gradient(tensor, tensor._stray_grad_guard)
    return local


class StrayGradientGuard:
    """Refuses a gradient that arrives at a wrapper itself.

    Attributes:
        what: the wrapper in words; a reference to it would be a cycle.
        expected: how many running bridges receive gradients at the wrapper (`function_bridge`).
    """

    __slots__ = ("expected", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.expected = 0

    def __call__(self, _: Tensor) -> None:
        """Raise, unless a bridge takes the gradient. Called by C++ with the gradient.

        Raises:
            UnsupportedError: always, but for that.
        """
        if not self.expected:
            raise UnsupportedError(
                f"{self.what} went into a custom autograd.Function that returned plain tensors: "
                "its gradient would not reach the local data. Call the Function on x.to_local()."
            )
