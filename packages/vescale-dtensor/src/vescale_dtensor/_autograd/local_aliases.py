"""Local tensors under another gradient: complete for a leaf, or counted on one coordinate only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.uses import widened
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._torch.overridable import one_step


@one_step
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


def counted_once(local: Tensor, layout: Layout, axes: int, shape: Any) -> Tensor:
    """The same values; their cotangent counts on coordinate 0 of these axes only."""
    if not (axes and local.requires_grad and torch.is_grad_enabled()):
        return local
    return _counted(local, layout, axes, shape)


@one_step
def _counted(local: Tensor, layout: Layout, axes: int, shape: Any) -> Tensor:
    alias: Tensor = _CountedOnce.apply(local, layout, axes, shape)  # type: ignore[no-untyped-call]
    return alias


class _CountedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, axes: int, shape: Any) -> Tensor:
        ctx.layout, ctx.axes, ctx.shape = layout, axes, shape
        return local.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return widened(cotangent, ctx.layout, 0, ctx.axes, ctx.shape), None, None, None
