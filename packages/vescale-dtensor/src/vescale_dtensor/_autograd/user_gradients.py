"""Conversions between a local cotangent and the gradient a user sees, a complete DTensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vescale_dtensor._autograd.cotangent import GradType, TypedMove, dual, redistribute_local
from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._autograd.uses import (
    average_factor,
)
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._tensor.dtensor import DTensor, wrap_as
from vescale_dtensor._torch.compat import (
    materialized,
)


def as_gradient(
    local: Tensor, layout: Layout, varying: int, shape: Any, of_leaf: bool = False
) -> DTensor:
    """A local cotangent of a tensor of this layout, as the user sees it."""
    factor = 1 if of_leaf else average_factor(layout)
    if factor != 1:
        local = local * factor  # each term of an average has its part of the gradient
    side = dual(GradType(layout, varying))
    usual = redistribute_local(
        materialized(local), TypedMove(side, GradType(side.layout, 0), tuple(shape))
    )
    return wrap_as(usual, side.layout, shape)


def as_cotangent(gradient: DTensor, layout: Layout, varying: int, of_leaf: bool = False) -> Tensor:
    """The user's gradient of a tensor of this layout, as autograd passes it on below."""
    side = dual(GradType(layout, varying))
    placed = redistributed(gradient, side.layout)
    local = redistribute_local(
        placed._local_tensor, TypedMove(GradType(side.layout, 0), side, tuple(placed.shape))
    )
    factor = 1 if of_leaf else average_factor(layout)
    return local if factor == 1 else local / factor
