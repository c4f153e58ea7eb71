"""Uses of a leaf's local tensor: itself where an op varies on all its axes, else an alias of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.leaf_gradient import LeafGradient
from vescale_dtensor._autograd.uses import CotangentReduction, as_partial, fork_uses
from vescale_dtensor._torch.compat import applied
from vescale_dtensor._torch.overridable import overridable


class InvariantUse(torch.autograd.Function):
    """A use of a leaf that is invariant on some axes where its gradient may be partial."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, leaf: LeafGradient, varying: int, shape: Any) -> Tensor:
        """Return an alias of the leaf."""
        # The leaf holds neither the node nor what it is part of: no cycle.
        ctx.leaf, ctx.varying, ctx.shape = leaf, varying, shape
        return local.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Keep the cotangent on coordinate 0 of the axes where the leaf's gradient is partial."""
        leaf, varying = ctx.leaf, ctx.varying
        # Read now and not in forward: uses noted since may have made further axes partial, and
        # what this one contributes is added to theirs.
        wide = varying | leaf.partial
        return as_partial(cotangent, leaf.layout, varying, wide, ctx.shape), None, None, None


_invariant_use = applied(InvariantUse)


def is_alias_of_leaf(local: Tensor) -> bool:
    """Whether a local tensor is an alias of a leaf, or stands for a gathered one."""
    node = local.grad_fn
    if isinstance(node, InvariantUse._backward_cls | AveragedUse._backward_cls):
        return True
    return bool(getattr(node, "stands_for_leaves", False))


class AveragedUse(torch.autograd.Function):
    """A use of a leaf that is `Partial("avg")`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, factor: int) -> Tensor:
        """Return an alias of the leaf."""
        ctx.factor = factor
        return local.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Turn the local tensor's cotangent, 1/factor of the gradient, into the gradient."""
        return cotangent * ctx.factor, None


_averaged = applied(AveragedUse)


@overridable
def averaged_use(alias: Tensor, factor: int) -> Tensor:
    """An alias of a leaf that is `Partial("avg")` on axes of `factor` coordinates in all."""
    result: Tensor = _averaged(alias, factor)
    return result


@overridable
def leaf_for_use(leaf: LeafGradient, local: Tensor, varying: int, shape: Any) -> Tensor:
    """The leaf's local tensor, or an alias of it, for an op that varies on these axes.

    Notes the use. No node is made where the op varies on every replicated axis.
    """
    if leaf.average != 1:
        return averaged_use(_leaf_for_use(leaf, local, varying, shape), leaf.average)
    return _leaf_for_use(leaf, local, varying, shape)


def _leaf_for_use(leaf: LeafGradient, local: Tensor, varying: int, shape: Any) -> Tensor:
    """`leaf_for_use`, but for the factor of an average."""
    # Axes on which this use varies, but the leaf's contributions have to stay complete: a node of
    # its own reduces this use's cotangent there, in backward. The recursion has none left.
    complete = varying & leaf.never_partial & ~leaf.partial
    if complete:
        kept = varying & ~complete
        reduction = CotangentReduction(leaf.layout, kept, leaf.layout)
        return fork_uses(
            _leaf_for_use(leaf, local, kept, shape), local, (varying,), reduction, shape
        )[0]
    leaf.note_use(varying)
    # Partial on every axis where it can be: nothing to mask, so no node.
    if not leaf.layout.replicated & ~varying:
        return local
    alias: Tensor = _invariant_use(local, leaf, varying, shape)
    return alias


def try_never_partial(leaf: LeafGradient, varying: int) -> bool:
    """Try to mark the replicated axes not in `varying` as never partial.

    Uses that vary on exactly these axes then need no autograd node.

    Returns:
        Whether it was possible: not if contributions are partial on such an axis already.
    """
    complete = leaf.layout.replicated & ~varying
    if leaf.partial & complete:
        return False
    leaf.never_partial |= complete
    return True
