"""Writes to a view that had to be a copy, where the way back into its base is known.

`x.mT.mul_(2)` of an unevenly sharded `x`: the transpose has to be redistributed, so it is a copy.
The op runs on a clone of it, the values go into `x`, and then into the copy, as if both shared
memory. A view of such a view goes back through both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._dispatch.execute import after_mutation
from vescale_dtensor._dispatch.overlapping_writes import copy_into, refuse_overlapping
from vescale_dtensor._planning.op_call import expanded_dims
from vescale_dtensor._tensor.copied_views import Scatter, is_copied_only_as
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.state import local_replaced

# They change what a tensor is, and not its elements.
_STRUCTURAL = """
requires_grad_ detach_ resize_ resize_as_ set_ rename_ share_memory_ transpose_ swapaxes_ swapdims_
t_ squeeze_ unsqueeze_ as_strided_
"""
_NO_WRITES = frozenset(name for name in _STRUCTURAL.split())
# One device draws in another order where memory has gaps, and a clone has none.
_DRAWS = "normal_ uniform_ bernoulli_ random_ exponential_ cauchy_ log_normal_ geometric_"
_DRAWING = frozenset(name for name in _DRAWS.split())
_ASKING = frozenset(("__index__", "__int__", "__invert__", "__init__", "__iter__"))


def write_through(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any] | None:
    """Run an in-place op on copied views and on their bases. Collective.

    None where that cannot be done: where autograd records it, where another copy of the base lives,
    which would not change, and where nothing leads back. All ranks decide alike: by metadata, and
    by which views live.

    Returns:
        What the op returns, as the only item.

    Raises:
        RuntimeError: a write to elements that share memory, as in torch.
    """
    if not args or not _writes(getattr(func, "__name__", "")):
        return None
    listed = isinstance(args[0], list | tuple)
    written = list(args[0]) if listed else [args[0]]
    copies = [t for t in written if isinstance(t, DTensor) and t._rare.way_back is not None]
    if not copies or len({id(t._view_copy_of) for t in copies}) < len(copies):
        return None
    if func.__name__ == "__setitem__" and any(expanded_dims(t) for t in copies):
        return None  # torch refuses some of these, by the strides of the part that is written to
    operands = tensors_within((args, kwargs))
    for copied in copies:
        refuse_overlapping(copied, func, operands)
    if func.__name__ in _DRAWING and any(t._spec.has_gaps for t in copies):
        return None
    ways = [_way_of(copied, operands) for copied in copies]
    if any(not way for way in ways):
        return None
    clones = {id(t): t.clone() for t in copies}
    given = [clones.get(id(t), t) for t in written]
    answer = func(given if listed else given[0], *args[1:], **kwargs)
    with torch.no_grad():
        for copied, way in zip(copies, ways, strict=True):
            values = [clones[id(copied)]]
            for scatter, _ in way:
                values.append(scatter(values[-1]))
            # The base first: copies may have some of its memory.
            family = [copied, *(base for _, base in way)]
            for tensor, found in reversed([*zip(family, values, strict=True)]):
                _store(tensor, found)
    return (None if answer is None else args[0],)


def _writes(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _ASKING)
    return name.endswith("_") and name not in _NO_WRITES


def _way_of(view: DTensor, operands: list[Tensor]) -> list[tuple[Scatter, DTensor]]:
    """What makes each tensor on the way to the base, with that tensor; empty if there is no way."""
    way: list[tuple[Scatter, DTensor]] = []
    last = view
    while last._rare.way_back is not None:
        scatter = last._rare.way_back.scatter()
        if scatter is None:
            return []
        last = last._rare.way_back.base
        way.append((scatter, last))
    family = [view, *(base for _, base in way)]
    if last._view_copy_of is not None or not is_copied_only_as(family, last):
        return []
    if not torch.is_inference_mode_enabled() and any(
        tensor._local_tensor.is_inference() for tensor in family
    ):
        return []  # torch refuses the write
    wanted = any(tensor.requires_grad for tensor in (*family, *operands))
    # One that is partial is stored anew, without the history that it has.
    anew = any(t._view_copy_of is not None and t._spec.layout.partial for t in family)
    return [] if wanted and (anew or torch.is_grad_enabled()) else way


def _store(tensor: DTensor, values: DTensor) -> None:
    """Let a tensor have these values in its own layout. Collective."""
    local = redistributed(values, tensor._spec.layout)._local_tensor.detach()
    if tensor._view_copy_of is not None and tensor._spec.layout.partial:
        # One rank may have its part in the base's memory, which holds the total.
        tensor._local_tensor = local.clone()
        local_replaced(tensor)
    else:
        copy_into(tensor._local_tensor, local)
    after_mutation(tensor)
