"""Aliases of a local tensor whose gradient is interpreted differently.

It is either the complete gradient, for a leaf of the caller, or a partial sum to which only
coordinate 0 contributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.uses import as_partial
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._torch.overridable import overridable


@overridable
def alias_of_leaf(leaf: Tensor) -> Tensor:
    """A non-leaf with the data of a leaf, so that its cotangent is reduced before it arrives."""
    alias: Tensor = _Alias.apply(leaf)  # type: ignore[no-untyped-call]
    return alias


class _Alias(torch.autograd.Function):
    """The node between a caller's leaf and its alias; it changes nothing."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        # detach(), here and below: a view would be rebuilt by autograd when its base is written to.
        return local.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


def partial_alias(local: Tensor, layout: Layout, axes: int, shape: Any) -> Tensor:
    """An alias whose cotangent is kept on coordinate 0 of these axes, and zero elsewhere.

    Args:
        local: local tensor, replicated on these axes.
        layout: its layout.
        axes: mask of mesh axes.
        shape: global shape.
    """
    # Without grad, or without axes, the tensor itself does: no node is recorded.
    if not (axes and local.requires_grad and torch.is_grad_enabled()):
        return local
    return _partial_alias(local, layout, axes, shape)


@overridable
def _partial_alias(local: Tensor, layout: Layout, axes: int, shape: Any) -> Tensor:
    alias: Tensor = _PartialAlias.apply(local, layout, axes, shape)  # type: ignore[no-untyped-call]
    return alias


class _PartialAlias(torch.autograd.Function):
    """The node of `partial_alias`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, axes: int, shape: Any) -> Tensor:
        ctx.layout, ctx.axes, ctx.shape = layout, axes, shape
        return local.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return as_partial(cotangent, ctx.layout, 0, ctx.axes, ctx.shape), None, None, None
