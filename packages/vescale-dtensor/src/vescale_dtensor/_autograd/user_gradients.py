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
    with_own_elements,
)


def as_gradient(
    local: Tensor, layout: Layout, varying: int, shape: Any, of_leaf: bool = False
) -> DTensor:
    """A local cotangent as the gradient that users see: a DTensor.

    Args:
        local: local cotangent of the tensor.
        layout: the tensor's layout.
        varying: mask of the axes on which the cotangent is partial where the tensor is replicated.
        shape: global shape.
        of_leaf: whether the tensor is a leaf.
    """
    # The cotangent of each local tensor of an average of n is 1/n of the gradient. A leaf's is the
    # gradient already: `AveragedUse` has multiplied it.
    factor = 1 if of_leaf else average_factor(layout)
    if factor != 1:
        local = local * factor
    side = dual(GradType(layout, varying))
    # Nothing is sent: only the type changes. A recorded gradient gets a node for that, as users may
    # use it in any way, like any other tensor.
    usual = redistribute_local(
        with_own_elements(materialized(local)),
        TypedMove(side, GradType(side.layout, 0), tuple(shape)),
    )
    return wrap_as(usual, side.layout, shape)


def as_cotangent(gradient: DTensor, layout: Layout, varying: int, of_leaf: bool = False) -> Tensor:
    """The inverse of `as_gradient`: a user's gradient as a local cotangent. Collective.

    Args:
        gradient: a DTensor of the tensor's global shape, in any layout.
        layout: the tensor's layout.
        varying: mask of the axes on which the cotangent shall be partial where the tensor is
            replicated.
        of_leaf: whether the tensor is a leaf.
    """
    side = dual(GradType(layout, varying))
    placed = redistributed(gradient, side.layout)
    local = redistribute_local(
        placed._local_tensor, TypedMove(GradType(side.layout, 0), side, tuple(placed.shape))
    )
    factor = 1 if of_leaf else average_factor(layout)
    return local if factor == 1 else local / factor
