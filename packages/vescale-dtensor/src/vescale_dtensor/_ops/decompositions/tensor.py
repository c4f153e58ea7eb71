"""Decompositions: functions written as other torch functions, each of which has its own rule.

A decomposition returns `NotImplemented` for a call that it does not cover; the fallback then runs
it, and raises torch's error where it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.dispatch import by_rule, compute
from vescale_dtensor._dispatch.out_argument import call_with_out
from vescale_dtensor._ops.common.functions import functions
from vescale_dtensor._ops.common.sharded_dim import pad_dim
from vescale_dtensor._planning import Reads, Rule
from vescale_dtensor._planning.op_call import wrap_dim
from vescale_dtensor._torch.compat import any_autocast, variable_functions

# torch's Python functions do not see tensors in lists: such calls arrive under the C++ function.
_PLACES = (torch, torch.Tensor, torch.functional, torch.linalg, variable_functions)


def _listed(tensors: Sequence[Any]) -> list[Tensor]:
    """Tensors that were given one by one, or as one list."""
    first = tensors[0] if tensors else ()
    return list(first) if isinstance(first, list | tuple) else list(tensors)


def _at_least(ndim: int, raise_one: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def run(*tensors: Any) -> Any:
        found = [x if x.ndim >= ndim else raise_one(x) for x in _listed(tensors)]
        alone = len(tensors) == 1 and isinstance(tensors[0], Tensor)
        return found[0] if alone else tuple(found)

    return run


def _two_dims(x: Tensor) -> Tensor:
    return x.reshape(1, 1) if x.ndim == 0 else x.unsqueeze(0)


def _three_dims(x: Tensor) -> Tensor:
    if x.ndim == 0:
        return x.reshape(1, 1, 1)
    return x.unsqueeze(0).unsqueeze(-1) if x.ndim == 1 else x.unsqueeze(-1)


atleast_1d = _at_least(1, lambda x: x.reshape(1))
atleast_2d = _at_least(2, _two_dims)
atleast_3d = _at_least(3, _three_dims)


def _hstack(tensors: Sequence[Tensor]) -> Tensor:
    found = atleast_1d(list(tensors))
    return torch.cat(found, 0 if found[0].ndim == 1 else 1)


def _vstack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(atleast_2d(list(tensors)))


def _dstack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(atleast_3d(list(tensors)), 2)


def _column_stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x if x.ndim > 1 else x.reshape(x.numel(), 1) for x in tensors], 1)


def _broadcast_tensors(*tensors: Any) -> Any:
    found = _listed(tensors)
    shape = torch.broadcast_shapes(*[x.shape for x in found])  # type: ignore[no-untyped-call]
    return tuple(x if x.shape == shape else x.expand(shape) for x in found)


def _meshgrid(*tensors: Any, indexing: str = "ij") -> Any:
    found = _listed(tensors)
    # `xy` is the grid of `ij` with the first two inputs swapped, and the results swapped back.
    swapped = indexing == "xy" and len(found) > 1
    if any(x.ndim > 1 for x in found) or indexing not in ("ij", "xy"):
        return NotImplemented  # torch says what is wrong
    order = [1, 0, *range(2, len(found))] if swapped else range(len(found))
    ordered = [found[i] for i in order]
    shape = [x.numel() for x in ordered]
    grids = [
        x.reshape([-1 if i == d else 1 for i in range(len(shape))]).expand(shape)
        for d, x in enumerate(ordered)
    ]
    return tuple(grids[i] for i in order)


def _cartesian_prod(*tensors: Any) -> Any:
    found = _listed(tensors)
    if any(x.ndim != 1 for x in found):
        return NotImplemented
    if len(found) == 1:
        return found[0]
    return torch.stack([grid.reshape(-1) for grid in _meshgrid(*found)], 1)


def _kron(input: Tensor, other: Tensor) -> Tensor:
    ndim = max(input.ndim, other.ndim)
    first = [1] * (ndim - input.ndim) + list(input.shape)
    second = [1] * (ndim - other.ndim) + list(other.shape)
    # Per dim, [a, 1] times [1, b] is [a, b]: every product once. Each pair then becomes one dim.
    left = input.reshape([n for extent in first for n in (extent, 1)])
    right = other.reshape([n for extent in second for n in (1, extent)])
    return (left * right).reshape([a * b for a, b in zip(first, second, strict=True)])


def _tile(input: Tensor, *more: Any, dims: Any = ()) -> Tensor:
    sizes = list(more[0] if more and isinstance(more[0], list | tuple) else more or dims)
    return input.repeat([1] * (input.ndim - len(sizes)) + sizes)


def _nanmean(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if not (input.is_floating_point() or input.is_complex()):
        return NotImplemented
    # As torch: the count has no gradient.
    count = input.detach().isnan().logical_not().sum(dim, keepdim)
    return torch.nansum(input, dim, keepdim, dtype=dtype) / count


def _norm(
    input: Tensor,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """`torch.norm` and `Tensor.norm`."""
    if isinstance(p, Tensor) or not input.is_floating_point():
        return NotImplemented
    if p == "nuc":
        fits = dtype is None and (dim is not None or input.ndim == 2)
        dims = (0, 1) if dim is None else dim
        return torch.linalg.matrix_norm(input, p, dims, keepdim) if fits else NotImplemented
    if isinstance(p, str) and p != "fro":
        return NotImplemented  # torch refuses "2", which Python reads as a number
    # Of the elements as one vector, so shards contribute partial norms.
    order = 2.0 if p is None or p == "fro" else float(p)
    if p == "fro" and dim is not None and not isinstance(dim, int) and len(dim) > 2:
        return NotImplemented
    return torch.linalg.vector_norm(input, order, dim, keepdim, dtype=dtype)


def _linalg_norm(
    A: Tensor,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if not A.is_floating_point() or isinstance(ord, Tensor):
        return NotImplemented
    if ord is None:
        return torch.linalg.vector_norm(A, 2, dim, keepdim, dtype=dtype)
    count = A.ndim if dim is None else 1 if isinstance(dim, int) else len(dim)
    if count == 1 and not isinstance(ord, str):
        return torch.linalg.vector_norm(A, ord, dim, keepdim, dtype=dtype)
    if count == 2:
        dims = (-2, -1) if dim is None else dim
        return torch.linalg.matrix_norm(A, ord, dims, keepdim, dtype=dtype)
    return NotImplemented


def _dist(input: Tensor, other: Tensor, p: float = 2) -> Any:
    if any_autocast():
        return NotImplemented  # autocast may widen the op, and not the parts of it
    return torch.linalg.vector_norm(input - other, p)


def _equal(input: Tensor, other: Tensor) -> Any:
    if input.dtype != other.dtype:
        return NotImplemented
    # Global shapes: all ranks go on to compare values, or none does.
    return tuple(input.shape) == tuple(other.shape) and bool((input == other).all())


def _allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    # Reduced over all ranks before Python sees it: no rank branches on its own shard.
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


def _diagflat(input: Tensor, offset: int = 0) -> Tensor:
    return torch.diag_embed(input.reshape(-1), offset)


def _trace(input: Tensor) -> Any:
    # As in `_dist`: under autocast the sum could have another dtype than torch's `trace`.
    return input.diagonal().sum() if input.ndim == 2 and not any_autocast() else NotImplemented


def _reversed_matmul(self: Tensor, other: Any) -> Any:
    return torch.matmul(other, self)


def _sum_to_size(self: Tensor, *sizes: Any, size: Any = ()) -> Any:
    target = tuple(sizes[0] if sizes and isinstance(sizes[0], list | tuple) else sizes or size)
    more = self.ndim - len(target)
    # (2, 3) fits nothing: a target with more dims than the operand is left to torch's error.
    kept = list(zip(self.shape[more:], target, strict=True)) if more >= 0 else [(2, 3)]
    if any(n not in (m, 1) for m, n in kept):
        return NotImplemented
    dims = [*range(more), *(more + i for i, (m, n) in enumerate(kept) if n == 1 != m)]
    return self.sum(dims, keepdim=True).reshape(target) if dims else self


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    if any_autocast() or not -1 <= dim < v.ndim:
        return NotImplemented
    others = [d for d in range(v.ndim) if d != dim]  # -1 stands for none
    kept = dim >= 0
    norms = tuple(n if d == dim else 1 for d, n in enumerate(v.shape))
    if g.shape != norms and (kept or g.numel() != 1):
        return NotImplemented  # torch's kernel reads other shapes in a way of its own
    v = v.contiguous()  # as torch's kernel does, so that the result is row-major
    norm = torch.linalg.vector_norm(v, 2, others, keepdim=kept) if others else v.abs()
    # The quotient first, as torch does: the other order would round differently.
    return v * (g / norm)


def _is_all_true(input: Tensor) -> Any:
    return input.all() if input.dtype is torch.bool else NotImplemented


def _block_diag(*tensors: Any) -> Any:
    found = [_two_dims(x) if x.ndim < 2 else x for x in _listed(tensors)]
    if any(x.ndim != 2 for x in found) or len({x.dtype for x in found}) != 1:
        return NotImplemented
    columns = [x.shape[1] for x in found]
    # Each block is padded on the global tensor, so rows follow on in the order of the blocks.
    rows = [
        torch.nn.functional.pad(x, (sum(columns[:i]), sum(columns[i + 1 :])))
        for i, x in enumerate(found)
    ]
    return torch.cat(rows)


def _chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int) -> Any:
    """`_chunk_cat`: tensors padded to equal chunks, each chunk flattened, chunks concatenated."""
    along = wrap_dim(dim, tensors[0].ndim) if tensors else None
    if num_chunks < 1 or along is None or any(x.ndim <= along for x in tensors):
        return NotImplemented
    front = tuple(tensors[0].shape[:along])
    if any(x.dtype != tensors[0].dtype or x.shape[:along] != front for x in tensors):
        return NotImplemented
    rows = []
    for x in tensors:
        # Of the global extent: padded by rank, chunks would begin elsewhere on each.
        missing = -x.shape[along] % num_chunks
        wide = pad_dim(x, along, missing)
        rows.append(wide.reshape(*front, num_chunks, prod(wide.shape[along:]) // num_chunks))
    return torch.cat(rows, -1)


def _copy_of(view: Callable[..., Any]) -> Callable[..., Any]:
    """The `_copy` form of a view function."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = view(*args, **kwargs)
        # Torch's `_copy` forms are row-major, where `clone` would keep the strides of the view.
        if isinstance(found, Tensor):
            return found.clone(memory_format=torch.contiguous_format)
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in found)

    return run


def _viewed_or_copied(input: Tensor, size: Any = None, *, dtype: Any = None) -> Any:
    """What `view_copy` copies: unlike `view`, it takes sizes that no view could have."""
    if dtype is not None or isinstance(size, torch.dtype):
        return input.view(size if dtype is None else dtype)
    return input.reshape(size)


# Views with a `_copy` form.
_VIEWS = """
permute transpose t squeeze unsqueeze narrow diagonal unbind split split_with_sizes select
"""
_TABLE: dict[str, Callable[..., Any]] = {
    "atleast_1d": atleast_1d,
    "atleast_2d": atleast_2d,
    "atleast_3d": atleast_3d,
    "hstack": _hstack,
    "vstack row_stack": _vstack,
    "dstack": _dstack,
    "column_stack": _column_stack,
    "broadcast_tensors": _broadcast_tensors,
    "meshgrid": _meshgrid,
    "cartesian_prod": _cartesian_prod,
    "kron": _kron,
    "tile": _tile,
    "nanmean": _nanmean,
    "dist": _dist,
    "equal": _equal,
    "allclose": _allclose,
    "diagflat": _diagflat,
    "trace": _trace,
    "__rmatmul__": _reversed_matmul,
    "sum_to_size": _sum_to_size,
    "_weight_norm": _weight_norm,
    "_is_all_true": _is_all_true,
    "block_diag": _block_diag,
    "_chunk_cat": _chunk_cat,
    **{f"{name}_copy": _copy_of(getattr(torch, name)) for name in _VIEWS.split()},
    **{f"{name}_copy": _copy_of(getattr(Tensor, name)) for name in ("expand", "unfold")},
    "view_copy": _copy_of(_viewed_or_copied),
    "alias_copy detach_copy": _copy_of(torch.clone),
}


def _writes(func: Callable[..., Any]) -> int | None:
    name = func.__name__
    return 0 if name.endswith("_") and not name.endswith("__") else None


def _handler(func: Callable[..., Any], body: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of a decomposition: adds `out=`, and the fallback for calls it does not cover."""
    # A rule that never holds: tensors without dims run replicated all the same, without a note.
    unknown = Rule("composed", lambda _: None, Reads.NUMBERS, writes=_writes(func))

    @wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Only the last step's result goes into `out`: those in between may have other shapes.
        if kwargs.get("out") is not None:
            return call_with_out(func, args, kwargs, compute)
        kwargs.pop("out", None)
        result = body(*args, **kwargs)
        return by_rule(unknown, func, args, kwargs) if result is NotImplemented else result

    run.__module__ = __name__
    return run


def handled(table: dict[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Handlers of all functions that torch has under the names in a table of decompositions."""
    return handled_as(
        {func: body for names, body in table.items() for func in functions(names, _PLACES)}
    )


def handled_as(table: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Handlers of functions, given their decompositions."""
    return {func: _handler(func, body) for func, body in table.items()}


HANDLERS: dict[Any, Callable[..., Any]] = {
    **handled(_TABLE),
    **{func: _handler(func, _norm) for func in functions("norm", (torch, torch.Tensor))},
    torch.linalg.norm: _handler(torch.linalg.norm, _linalg_norm),
}
