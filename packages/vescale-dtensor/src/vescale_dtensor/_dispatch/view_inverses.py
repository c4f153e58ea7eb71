"""Writes values of a copied view back into the tensor that it is a view of.

Each such copy notes the call that made it. What is written to the copy is put back by the inverse
of that call: transposed and reshaped back where it only reorders elements, which sends what the
view itself sent; into the gathered base where it leaves elements out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.redistribute import replicated
from vescale_dtensor._layout.spec import spec_of
from vescale_dtensor._planning.memory_order import views_without_data
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import function_name
from vescale_dtensor._tensor.copied_views import Scatter, way_back
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.rare_state import rare_state

# Functions whose result has the dims of their operand in another order, whatever the extents.
_PERMUTE = frozenset(
    ("t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis")
)
# An element of the base may have several places in these.
_OVERLAPPING = frozenset(("unfold", "as_strided"))


def give_way_back(view: Any, base: Any, find: Callable[[], Scatter | None]) -> None:
    """Let a copied view be written to.

    Args:
        view: the view; nothing is done where it is none.
        base: of what.
        find: returns what makes the base with other values of the view in it; None if nothing does.
    """
    if isinstance(view, DTensor) and view._view_copy_of is not None and isinstance(base, DTensor):
        rare_state(view).way_back = way_back(base, find)


def note_ways_back(call: OpCall, results: Any) -> None:
    """Let those results that are copied views of operand 0 be written to."""
    base = call.operands[0]
    if not call.args or base is not call.args[0] or not isinstance(base, DTensor):
        return
    views = results if isinstance(results, list | tuple) else (results,)
    for index, view in enumerate(views):
        if isinstance(view, DTensor) and view._rare.way_back is None and view is not base:
            give_way_back(view, base, partial(_inverse, call, index, view.shape, view.dtype))


def is_part_at(value: Any, base: DTensor, index: Any) -> bool:
    """Whether a value is the copied view `base[index]`, whose values the base has.

    Whatever is written to such a view is written to its base as well: `x[i] *= 2` ends with
    assigning it to itself.

    Args:
        value: what is assigned.
        base: what it is assigned to.
        index: where, in numbers and slices.
    """
    if not isinstance(value, DTensor) or value._rare.way_back is None:
        return False
    way = value._rare.way_back
    if way.base is not base or getattr(way.find, "func", None) is not _inverse:
        return False
    if way.scatter() is None:  # what was written to it went nowhere
        return False
    call, position = way.find.args[:2]
    place, views = torch.empty(tuple(base.shape), device="meta")[index], _on(call, base.shape)
    return position < len(views) and _geometry(views[position]) == _geometry(place)


def _geometry(view: Tensor) -> tuple[Any, ...]:
    return view.shape, view.stride(), view.storage_offset()


def _inverse(call: OpCall, index: int, viewed: torch.Size, dtype: torch.dtype) -> Scatter | None:
    """What makes the base of a view out of the values of result `index`; None if it is not known.

    Which it is follows from shapes, so all ranks answer alike.
    """
    base = call.operands[0]
    name = _name(call.func)
    if base.is_complex() or name in _OVERLAPPING or dtype != base.dtype:
        return None
    if name in _PERMUTE:
        order = [extent - 2 for extent in _on(call, range(2, 2 + base.ndim))[0].shape]
        back = sorted(range(base.ndim), key=order.__getitem__)
        return lambda values: values.permute(back)
    views = _on(call, base.shape)
    if index >= len(views) or views[index].shape != viewed:
        return None
    view = views[index]
    if view.numel() == base.numel() and view.is_contiguous():
        shape = base.shape  # now: a tensor may become its own view
        return lambda values: values.reshape(shape)
    if any(not step and n > 1 for n, step in zip(view.shape, view.stride(), strict=True)):
        return None  # expanded: torch refuses to write to it
    return partial(_written_part, base, view)


def _name(func: Callable[..., Any]) -> str:
    """The short name of a function, or of the property that a getter belongs to."""
    owner = getattr(func, "__self__", None)
    name = getattr(owner, "__name__", None) if func.__name__ == "__get__" else None
    return name or function_name(func).rpartition(".")[2]


def _on(call: OpCall, shape: Sequence[int]) -> Sequence[Tensor]:
    """What the call returns of a row-major tensor without data of this shape."""
    return views_without_data(call, torch.empty(tuple(shape), device="meta")) or ()


def _written_part(base: Any, view: Tensor, values: DTensor) -> DTensor:
    """The base with values where `view` of a row-major tensor of its shape is. Collective."""
    whole = replicated(base)
    local = whole._local_tensor.detach().clone(memory_format=torch.contiguous_format)
    part = local.as_strided(view.shape, view.stride(), view.storage_offset())
    part.copy_(replicated(values)._local_tensor)
    return wrap(local, spec_of(whole._spec.layout, tuple(base.shape), local.dtype))
