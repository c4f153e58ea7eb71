"""The result of experts that got no rows: it has gradients all the same.

Without them a rank that got no token would not take part in the exchange of the backward, nor in
the sum of the experts' gradients, and the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def empty_result(rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return no rows, as `rows` has none, computed from all of these; their gradients are zeros."""
    result: Tensor = _EmptyResult.apply(rows, *parameters)  # type: ignore[no-untyped-call]
    return result


class _EmptyResult(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *parameters)
        return torch.zeros_like(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(one) if asked else None for one, asked in needed)
