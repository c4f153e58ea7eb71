"""`x[…] = value`: a view is taken and written to, so that only pieces that are written are touched.

An index that is no view (tensors, masks), or whose view has to be a copy, takes the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._call import Call, Reads
from vescale_dtensor._copies import check_writable
from vescale_dtensor._execute import refuse_view_of_leaf, written
from vescale_dtensor._fallback import run_replicated
from vescale_dtensor._rules.index import basic
from vescale_dtensor._tensor import DTensor


def _assign(target: Tensor, index: Any, value: Any) -> None:
    items = index if isinstance(index, tuple) else (index,)
    if isinstance(target, DTensor) and all(map(basic, items)):
        check_writable(target, "Tensor.__setitem__")
        view = target[index]
        refuse_view_of_leaf(view)
        if isinstance(view, DTensor) and view._copied_from is None:
            _write(view, value)
            written(target)
            return
        del view  # or the copy would forbid to write to what it was made of
    if isinstance(target, DTensor) and _is_mask(target, items, value):
        mask = items[0]
        target.masked_fill_(mask[(..., *(None,) * (target.ndim - mask.ndim))], value)
        return
    run_replicated(Call(torch.Tensor.__setitem__, (target, index, value), {}, Reads.NOTHING))


def _is_mask(target: DTensor, items: tuple[Any, ...], value: Any) -> bool:
    """Whether one mask says where a number goes, which needs no cast that torch would refuse."""
    if len(items) != 1 or not isinstance(items[0], Tensor) or not isinstance(value, int | float):
        return False
    mask = items[0]
    fits = mask.ndim > 0 and mask.shape == target.shape[: mask.ndim]
    return mask.dtype is torch.bool and fits and target.is_floating_point()


def _write(view: DTensor, value: Any) -> None:
    if not isinstance(value, Tensor):
        view.fill_(value)
        return
    # As torch does: dims of extent one in front of all others are of no account.
    surplus = value.ndim - view.ndim
    if surplus > 0 and all(n == 1 for n in value.shape[:surplus]):
        value = value.reshape(value.shape[surplus:])
    view.copy_(value)


HANDLERS: dict[Any, Callable[..., Any]] = {torch.Tensor.__setitem__: _assign}
"""Functions this module answers for."""
