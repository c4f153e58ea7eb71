"""Linear algebra, written as other torch functions that have rules."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._ops.decompositions.tensor import handled
from vescale_dtensor._planning.op_call import wrap_dim


def _cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Any:
    """Covariances, where observations may count several times, or more than others."""
    if input.ndim not in (1, 2) or not input.is_floating_point():
        return NotImplemented
    rows = input if input.ndim == 2 else input.unsqueeze(0)
    if fweights is None and aweights is None:
        # Deviations from the mean, as in torch: `E[xy] - E[x]E[y]` cancels for large means.
        away = rows - rows.mean(1, keepdim=True)
        result = (away @ away.t()) / max(0, rows.shape[1] - correction)
        return result if rows.shape[0] != 1 else result.reshape(())
    weights = [w for w in (fweights, aweights) if w is not None]
    if any((w is fweights) != _is_count(w) for w in weights):
        return NotImplemented  # torch wants integers as counts, and other weights that are none
    if any(w.shape != rows.shape[1:] for w in weights) or not rows.numel():
        return NotImplemented
    # All ranks read the same global value, so that all take the same branch.
    if any(bool((w.detach() < 0).any()) for w in weights):
        return NotImplemented  # torch raises
    weight = weights[0] if len(weights) == 1 else weights[0] * weights[1]
    total = weight.sum()
    degrees: Any = total
    if correction and aweights is not None:
        degrees = total - correction * (weight * aweights).sum() / total
    elif correction:
        degrees = total - correction
    away = rows - ((rows * weight).sum(1) / total).unsqueeze(1)
    # Without degrees of freedom torch divides by zero; a negative variance it never returns.
    result = (away @ (away * weight).t()) / degrees.clamp(min=0)
    return result if rows.shape[0] != 1 else result.reshape(())


def _is_count(weights: Tensor) -> bool:
    return not (weights.is_floating_point() or weights.is_complex())


def _corrcoef(input: Tensor) -> Any:
    found = _cov(input)
    if found is NotImplemented:
        return found
    if found.ndim == 0:
        # One, or NaN if the variance is zero, infinite or NaN: as in torch.
        return found / found
    spread = found.diagonal().sqrt()
    # Rounding may lead out of [-1, 1]: torch clamps too.
    return (found / spread.unsqueeze(1) / spread.unsqueeze(0)).clamp(-1, 1)


def _tensorinv(A: Tensor, ind: int = 2) -> Any:
    first, second = tuple(A.shape[:ind]), tuple(A.shape[ind:])
    if ind < 1 or prod(first) != prod(second):
        return NotImplemented
    return torch.linalg.inv(A.reshape(prod(first), -1)).reshape(second + first)


def _tensorsolve(A: Tensor, other: Tensor, dims: Any = None) -> Any:
    if dims is not None:
        last_dims = [wrap_dim(d, A.ndim) for d in dims]
        if None in last_dims or len(set(last_dims)) < len(last_dims):
            return NotImplemented
        # `reshape` below joins trailing dims: those to be solved for go last, in this order.
        A = A.movedim(dims, [*range(-len(last_dims), 0)])
    remaining = tuple(A.shape[other.ndim :])
    if not prod(remaining) == prod(other.shape) == prod(A.shape[: other.ndim]):
        return NotImplemented
    matrix = A.reshape(prod(other.shape), prod(remaining))
    return torch.linalg.solve(matrix, other.reshape(-1)).reshape(remaining)


def _lu(A: Tensor, pivot: bool = True, get_infos: bool = False) -> Any:
    if A.ndim < 2:
        return NotImplemented
    factors, pivots, infos = torch.linalg.lu_factor_ex(A, pivot=pivot, check_errors=not get_infos)
    named = getattr(torch.return_types, "_lu_with_info", tuple)
    return named((factors, pivots, infos)) if get_infos else (factors, pivots)


_TABLE: dict[str, Callable[..., Any]] = {
    "cov": _cov,
    "corrcoef": _corrcoef,
    "tensorinv": _tensorinv,
    "tensorsolve": _tensorsolve,
    "lu": _lu,
}

HANDLERS: dict[Any, Callable[..., Any]] = handled(_TABLE)
# `torch.linalg.lu` gives three factors, and has a rule.
HANDLERS.pop(torch.linalg.lu, None)
"""Functions this module answers for."""
