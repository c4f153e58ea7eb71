"""Aliases of a local tensor whose gradient means something else.

Either the complete gradient, for the caller's own leaf, or a partial one that only coordinate 0
contributes to.
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
    """The data of a leaf in a tensor that is none."""
    alias: Tensor = _Alias.apply(leaf)  # type: ignore[no-untyped-call]
    return alias


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return local.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


def partial_alias(local: Tensor, layout: Layout, axes: int, shape: Any) -> Tensor:
    """The same values; their cotangent counts on coordinate 0 of these axes only."""
    if not (axes and local.requires_grad and torch.is_grad_enabled()):
        return local
    return _partial_alias(local, layout, axes, shape)


@overridable
def _partial_alias(local: Tensor, layout: Layout, axes: int, shape: Any) -> Tensor:
    alias: Tensor = _PartialAlias.apply(local, layout, axes, shape)  # type: ignore[no-untyped-call]
    return alias


class _PartialAlias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, axes: int, shape: Any) -> Tensor:
        ctx.layout, ctx.axes, ctx.shape = layout, axes, shape
        return local.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return as_partial(cotangent, ctx.layout, 0, ctx.axes, ctx.shape), None, None, None
