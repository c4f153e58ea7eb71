"""`x[…] = value`: takes a view and writes to it, so that only the ranks that own it are touched.

Tensor indices go to `index_put`, behind the view that the rest of the index takes; a mask with a
scalar value is a `where`. Everything else, such as an index whose view would have to be a copy,
takes the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.dispatch import run_by_rule
from vescale_dtensor._dispatch.execute import after_mutation, refuse_view_of_leaf
from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._dispatch.overlapping_writes import refuse_overlapping_copy
from vescale_dtensor._dispatch.view_inverses import is_part_at
from vescale_dtensor._dispatch.written_views import write_through
from vescale_dtensor._ops.index.basic import basic
from vescale_dtensor._ops.index.gather import dims_taken, spread_out
from vescale_dtensor._ops.index.index_put import without_masks
from vescale_dtensor._tensor.copied_views import check_writable
from vescale_dtensor._tensor.dtensor import DTensor


def _numbers_fill() -> bool:
    try:
        torch.zeros(1, device="cpu").expand(2)[:] = 1.0
    except RuntimeError:
        return False
    return True


# Whether `x[0] = 1` is a fill, also of elements that share memory: from torch 2.15 on. Before, it
# is a copy, which torch refuses there.
_NUMBERS_FILL = _numbers_fill()


def _assign(target: Tensor, index: Any, value: Any) -> None:
    items = index if isinstance(index, tuple) else (index,)
    if isinstance(target, DTensor):
        if all(map(basic, items)) and is_part_at(value, target, index):
            return
        if target._rare.way_back is not None and write_through(
            torch.Tensor.__setitem__, (target, index, value), {}
        ):
            return
        check_writable(target, "Tensor.__setitem__")
        if all(map(basic, items)):
            done = _assign_view(target, index, value)
        else:
            # A mask with one value keeps its shape: no rank has to know what others select.
            done = _assign_masked(target, items, value) or _assign_indexed(target, items, value)
        if done:
            return
    fallback(torch.Tensor.__setitem__, (target, index, value), {})


def _assign_view(target: DTensor, index: Any, value: Any) -> bool:
    # Views of the shards: a rank that owns none of the elements has an empty one to write.
    view = target[index]
    refuse_view_of_leaf(view)
    if isinstance(view, DTensor) and (isinstance(value, Tensor) or not _NUMBERS_FILL):
        refuse_overlapping_copy(view)
    # A view that had to be a copy: writing to it would not reach the target.
    if not isinstance(view, DTensor) or view._view_copy_of is not None:
        return False
    if isinstance(value, Tensor):
        value = _without_surplus(value, view.ndim)
        if isinstance(value, DTensor) and value.ndim < view.ndim:
            # What is assigned to itself, `x[None] = x`, overlaps in part but for its shape.
            value = value[(None,) * (view.ndim - value.ndim)]
        view.copy_(value)
    else:
        view.fill_(value)
    after_mutation(target)
    return True


def _without_surplus(value: Tensor, ndim: int) -> Tensor:
    """The value without leading dims of extent one, which torch ignores."""
    surplus = value.ndim - ndim
    if surplus > 0 and all(n == 1 for n in value.shape[:surplus]):
        return value.reshape(value.shape[surplus:])
    return value


def _assign_masked(target: DTensor, items: Sequence[Any], value: Any) -> bool:
    """Write one value, broadcast, wherever a mask is true. Returns whether it was done."""
    mask = items[0]
    if len(items) != 1 or not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        return False
    rest = target.ndim - mask.ndim
    if not mask.ndim or mask.shape != target.shape[: mask.ndim]:
        return False
    value = _without_surplus(_as_tensor(value, target), rest)
    if value.ndim > rest or (value.ndim and value.dtype != target.dtype):
        return False  # one value per selected element, or an error of torch's
    wide = mask.reshape((*mask.shape, *(1,) * rest))
    if value.ndim:  # `masked_fill_` takes values without dims only
        target.copy_(torch.where(wide, value, target))
    else:
        target.masked_fill_(wide, value.to(target.dtype))
    return True


def _as_tensor(value: Any, target: Tensor) -> Tensor:
    """The value as a tensor; a number takes the dtype of the target."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=target.dtype, device=target.device)


def _assign_indexed(target: DTensor, items: Sequence[Any], value: Any) -> bool:
    """Write at tensors and lists: slices and numbers take a view, `index_put` writes into it.

    Returns whether it was done.
    """
    found = [_as_index(item, target) for item in items]
    tensors = [item for item in found if isinstance(item, Tensor)]
    # Torch takes an index without dims for a number, which changes where indexed dims go.
    mixed = len(tensors) > 1 and any(not item.ndim for item in tensors)
    value = _as_tensor(value, target)
    known = value.dtype == target.dtype and all(item is not NotImplemented for item in found)
    # A cast of values is left to torch, and so is an index that it would refuse.
    spread = spread_out(found, target.ndim) if known else None
    if mixed or spread is None:
        return False
    everything = slice(None)
    parts = [part for item in spread for part in _parts(item)]
    view = target if all(part == everything for part in parts) else target[tuple(parts)]
    # Refused before anything is written.
    if view is not target:
        refuse_view_of_leaf(view)
    if not isinstance(view, DTensor) or view._view_copy_of is not None:
        return False
    indices = [i if isinstance(i, Tensor) else everything for i in spread if not isinstance(i, int)]
    chosen = sum(map(dims_taken, tensors))
    # Selected elements take the place of the indexed dims: so many dims the value may have.
    width = max(1 if item.dtype is torch.bool else item.ndim for item in tensors)
    value = _without_surplus(value, view.ndim - chosen + width)
    run_by_rule(torch.Tensor.__setitem__, (view, tuple(without_masks(indices)), value), {})
    after_mutation(target)
    return True


def _as_index(item: Any, target: Tensor) -> Any:
    if isinstance(item, list) and item and all(type(i) in (int, bool) for i in item):
        item = torch.tensor(item, device=target.device)
    if not isinstance(item, Tensor):
        return item if basic(item) else NotImplemented
    if item.dtype is torch.bool:
        return item if item.ndim else NotImplemented
    return item if item.dtype in (torch.int64, torch.int32) else NotImplemented


def _parts(item: Any) -> list[Any]:
    """The items of a view in place of one item; a tensor index takes all of its dims."""
    return [slice(None)] * dims_taken(item) if isinstance(item, Tensor) else [item]


HANDLERS: dict[Any, Callable[..., Any]] = {torch.Tensor.__setitem__: _assign}
"""Functions this module answers for."""
