"""`torch._fused_*_`: optimizer steps of whole lists in one kernel, on the lists of local tensors.

They are elementwise: it is enough that a parameter, its gradient and its states share a layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.redistribute import redistributed, replicated
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._fast_path.cache import list_cache
from vescale_dtensor._fast_path.foreach import ListCall
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._planning.plan import function_name
from vescale_dtensor._tensor.dtensor import DTensor

_NAMES = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


def _fused(func: Callable[..., Any]) -> Callable[..., None]:
    def run(parameters: list[Tensor], *lists: Any, **kwargs: Any) -> None:
        call = ListCall(func, (parameters, *lists), kwargs)
        # The key has the layouts of all lists, and hyperparameters by type alone: a new learning
        # rate finds the stored call.
        if call.key in list_cache:
            func(*call.args, **call.kwargs)
            return
        # Stored without a value: the key says that local tensors can be passed as they are.
        if call.key is not None and _moves_nothing(parameters, lists, kwargs):
            list_cache.store(call.key, None)
        layouts = [_layout(p, func) for p in parameters]
        named = {name: _locals(value, layouts) for name, value in kwargs.items()}
        func(*[_locals(value, layouts) for value in (parameters, *lists)], **named)

    return run


def _moves_nothing(parameters: list[Tensor], lists: Any, kwargs: dict[str, Any]) -> bool:
    """Whether each parameter, its gradient and states are DTensors of one layout, not partial."""
    for value in kwargs.values():
        if isinstance(value, DTensor):
            return False  # a loss scale, say, which may be partial
    for parameter, *others in zip(parameters, *[v for v in lists if v], strict=False):
        if not isinstance(parameter, DTensor) or parameter._spec.layout.partial:
            return False
        for other in others:
            if isinstance(other, DTensor):
                if other._spec.layout.placements != parameter._spec.layout.placements:
                    return False
            elif type(other) is not Tensor:
                return False
    return True


def _layout(parameter: Tensor, func: Callable[..., Any]) -> Layout | None:
    if not isinstance(parameter, DTensor):
        return None
    layout: Layout = parameter._spec.layout
    # An update is not linear in the parameter: partial sums cannot be updated each by itself.
    if layout.partial:
        raise UnsupportedError(
            f"{function_name(func)}: a parameter is laid out as {layout}; its terms cannot be "
            "updated one by one. Redistribute it to Replicate() or Shard(), or use fused=False."
        )
    return layout


def _locals(value: Any, layouts: list[Layout | None]) -> Any:
    """The local tensors of a list that has one entry for each parameter, in their layouts."""
    if isinstance(value, DTensor):
        # A loss scale or a flag applies to every element: each rank needs the global value.
        return replicated(value)._local_tensor
    if not isinstance(value, list | tuple):
        return value
    return [
        redistributed(item, layout)._local_tensor
        if isinstance(item, DTensor) and layout is not None
        else item
        for item, layout in zip(value, layouts, strict=bool(value))
    ]


HANDLERS: dict[Any, Callable[..., Any]] = {
    getattr(torch, name): _fused(getattr(torch, name)) for name in _NAMES if hasattr(torch, name)
}
