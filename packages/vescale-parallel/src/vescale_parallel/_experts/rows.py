"""Rows taken in an order, so that their gradients come back in a fixed order too.

`index_select` adds gradients of repeated rows up with atomics on CUDA, in any order. Here the
inverse is known: each row's gradients are fetched and added in the order of its repetitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Order:
    """Which rows are taken, and the way back.

    Attributes:
        take: row numbers, each row at most `times` times; a number behind the last row of what it
            is taken from is a row of zeros.
        give: (rows * times,): where in the result the first use of row 0 is, the second, ..., the
            first of row 1; a number behind the last is no use.
        times: how often each row may be taken.
        gaps: whether there may be numbers behind the last.
    """

    take: Tensor
    give: Tensor
    times: int = 1
    gaps: bool = False


def taken(x: Tensor, order: Order) -> Tensor:
    """Return rows of x (rows, width), in an order."""
    result: Tensor = _RowGather.apply(x, order)  # type: ignore[no-untyped-call]
    return result


class _RowGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return _rows(x, order.take, order.gaps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Back.apply(gradients[0], ctx.order), None  # type: ignore[no-untyped-call]


class _Back(Function):
    """The adjoint, with `_RowGather` as its own: gradients of any order."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, order: Order) -> Tensor:
        ctx.order = order
        rows = _rows(g, order.give, order.gaps)
        return _summed(rows, order.times)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return taken(gradients[0], ctx.order), None


def _summed(rows: Tensor, times: int) -> Tensor:
    # The number of rows is said, as a view of no elements cannot find it out.
    return rows if times == 1 else rows.view(len(rows) // times, times, rows.shape[1]).sum(1)


def _rows(x: Tensor, numbers: Tensor, gaps: bool) -> Tensor:
    if gaps:
        # One row of zeros behind the others: what a number behind the last stands for.
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return x.index_select(0, numbers)
