"""Functions of indices and masks, written as other torch functions that have rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.execute import give_strides
from vescale_dtensor._ops.decompositions.tensor import handled
from vescale_dtensor._planning.op_call import expanded_dims, wrap_dim
from vescale_dtensor._tensor.dtensor import DTensor


def _take(input: Tensor, index: Tensor) -> Any:
    # Of another dtype torch refuses the index; indexing would take it for a mask.
    if not input.numel() or not input.ndim or index.dtype is not torch.int64:
        return NotImplemented
    return input.reshape(-1)[index].contiguous()


def _masked_select(input: Tensor, mask: Tensor) -> Any:
    shape = torch.broadcast_shapes(input.shape, mask.shape)  # type: ignore[no-untyped-call]
    if not shape or mask.dtype is not torch.bool:
        return NotImplemented
    return input.expand(shape)[mask.expand(shape)]


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Any:
    shape = torch.broadcast_shapes(input.shape, mask.shape)  # type: ignore[no-untyped-call]
    found = _selected(shape, input, mask, source)
    return NotImplemented if found is None else _copy(input.expand(shape)).index_put_(*found)


def _masked_scatter_in_place(input: Tensor, mask: Tensor, source: Tensor) -> Any:
    try:
        # In place, the input itself cannot be broadcast: only the mask.
        wide = mask.expand(input.shape)
    except RuntimeError:
        return NotImplemented
    found = _selected(tuple(input.shape), input, wide, source)
    return NotImplemented if found is None else input.index_put_(*found)


def _selected(shape: Sequence[int], input: Tensor, mask: Tensor, source: Tensor) -> Any:
    """Where a mask is true, and the values for it; None where the arguments do not fit."""
    if not shape or mask.dtype is not torch.bool or source.dtype != input.dtype:
        return None
    # In row-major order of the global mask, in which torch takes from `source`. The count is a
    # global shape, so all ranks decide alike whether there are enough values.
    places = mask.expand(tuple(shape)).nonzero(as_tuple=True)
    count = places[0].shape[0]
    return (places, source.reshape(-1)[:count]) if count <= source.numel() else None


def _put_by(write: Callable[..., Any]) -> Callable[..., Any]:
    def put(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Any:
        found = _placed(input, index, source)
        return NotImplemented if found is None else write(input, *found, accumulate)

    return put


def _placed(input: Tensor, index: Tensor, source: Tensor) -> Any:
    """Indices per dim for those of the flattened tensor, and the values; None: they do not fit."""
    fits = index.numel() == source.numel() and source.dtype == input.dtype and input.numel()
    if not fits or not input.ndim or index.dtype is not torch.int64:
        return None
    flat, shape = index.reshape(-1), tuple(input.shape)
    start = torch.where(flat < 0, flat + input.numel(), flat)
    places = [start // prod(shape[d + 1 :]) % n for d, n in enumerate(shape)]
    outside = (start < 0) | (start >= input.numel())
    # Division would bring it back into range; this index torch refuses.
    places[0] = torch.where(outside, shape[0], places[0])
    return tuple(places), source.reshape(-1)


def _unravel_index(indices: Tensor, shape: Any) -> Any:
    sizes = [shape] if isinstance(shape, int) else list(shape)
    kind = indices.dtype
    if kind.is_floating_point or kind.is_complex or kind is torch.bool or not all(sizes):
        return NotImplemented
    # Row-major, as torch numbers elements; each index is converted alone, wherever it is.
    # One tensor of all results, of which they are views with gaps, as on one device.
    steps, extents = torch.tensor(
        [[prod(sizes[d + 1 :]) for d in range(len(sizes))], sizes], device=indices.device
    ).to(kind)
    return (indices.unsqueeze(-1) // steps % extents).unbind(-1)


def _nonzero_static(input: Tensor, *, size: int, fill_value: int = -1) -> Any:
    if not input.ndim or size < 0:
        return NotImplemented
    found = input.nonzero()[:size].contiguous()
    return torch.nn.functional.pad(found, (0, 0, 0, size - found.shape[0]), value=fill_value)


def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Any:
    at = wrap_dim(dim, input.ndim)
    place = None if at is None else wrap_dim(index, input.shape[at])
    if at is None or place is None:
        return NotImplemented
    places = torch.tensor([place], device=input.device)
    return _with_slices(input, at, places, src.unsqueeze(at))


def _slice_scatter(
    input: Tensor,
    src: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    if wrap_dim(dim, input.ndim) is None or step < 1:
        return NotImplemented
    # Python's own clamping of missing, negative and too large bounds, by the global extent.
    indices = range(*slice(start, end, step).indices(input.shape[dim]))
    places = torch.arange(
        # `arange` refuses an end before the start, which is an empty slice.
        indices.start,
        max(indices.start, indices.stop),
        step,
        device=input.device,
    )
    return _with_slices(input, dim, places, src)


def _with_slices(input: Tensor, dim: int, places: Tensor, src: Tensor) -> Any:
    """A copy with `src` as slices at these places, if its shape and dtype are theirs."""
    shape = list(input.shape)
    shape[dim] = len(places)
    if src.dtype != input.dtype or list(src.shape) != shape:
        return NotImplemented
    return _copy_with_gaps(input).index_copy_(dim, places, src)


def _copy_with_gaps(input: Tensor) -> Tensor:
    """A copy that keeps gaps in strides, as torch does where no two elements share memory."""
    result = input.clone()
    if isinstance(input, DTensor) and isinstance(result, DTensor) and not expanded_dims(input):
        give_strides(result, input._spec.tensor_meta.stride)
    return result


def _diagonal_scatter(
    input: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    pair = wrap_dim(dim1, input.ndim), wrap_dim(dim2, input.ndim)
    if pair[0] is None or pair[1] is None or src.dtype != input.dtype:
        return NotImplemented
    count = min(input.shape[dim1] - max(0, -offset), input.shape[dim2] - max(0, offset))
    rest = [n for d, n in enumerate(input.shape) if d not in pair]
    if pair[0] == pair[1] or list(src.shape) != [*rest, max(0, count)]:
        return NotImplemented
    positions = torch.arange(max(0, count), device=input.device)
    places = (positions + max(0, -offset), positions + max(0, offset))
    result = _copy_with_gaps(input)
    # A view: what is written to it is in `result`.
    result.movedim((pair[0], pair[1]), (0, 1)).index_put_(places, src.movedim(-1, 0))
    return result


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Any:
    if input.ndim != 1 or r < 1:
        return NotImplemented
    # Of indices, which every rank has; they do not depend on what a shard holds.
    places = torch.combinations(
        torch.arange(input.shape[0], device=input.device), r, with_replacement
    )
    return input[places]


def _unsafe_masked_index(
    input: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: Any
) -> Any:
    # Where the mask is false an index may be out of range: any element will do, as it is replaced.
    found = _clamped(input, indices)
    taken = input[tuple(slice(None) if i is None else i for i in found)]
    return taken.masked_fill(mask.logical_not(), fill)


def _unsafe_masked_add(
    input: Tensor, mask: Tensor, indices: Sequence[Tensor | None], values: Tensor
) -> Any:
    # Masked indices are clamped too: they add zero to some element, and raise no error.
    found = [i for i in _clamped(input, indices) if i is not None]
    if len(found) < len(indices):
        return NotImplemented
    # Filled and not multiplied: NaN and infinity times zero would be NaN.
    return input.index_put(tuple(found), values.masked_fill(mask.logical_not(), 0), True)


def _clamped(input: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    pairs = zip(indices, input.shape, strict=False)
    return [None if i is None else i.clamp(-n, n - 1) for i, n in pairs]


_TABLE: dict[str, Callable[..., Any]] = {
    "take": _take,
    "masked_select": _masked_select,
    "masked_scatter": _masked_scatter,
    "masked_scatter_": _masked_scatter_in_place,
    "put": _put_by(torch.Tensor.index_put),
    "put_": _put_by(torch.Tensor.index_put_),
    "unravel_index": _unravel_index,
    "nonzero_static": _nonzero_static,
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
    "diagonal_scatter": _diagonal_scatter,
    "combinations": _combinations,
    "_unsafe_masked_index": _unsafe_masked_index,
    "_unsafe_masked_index_put_accumulate": _unsafe_masked_add,
}

HANDLERS: dict[Any, Callable[..., Any]] = handled(_TABLE)
"""Functions this module answers for."""
