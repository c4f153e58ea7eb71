"""`torch._fused_*_`: optimizer steps of whole lists in one kernel, run on the lists of locals.

They are elementwise: parameter, gradient and states of one parameter in one layout are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._convert import redistributed, replicated
from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout import Layout
from vescale_dtensor._plan import function_name
from vescale_dtensor._tensor import DTensor

_NAMES = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


def _fused(func: Callable[..., Any]) -> Callable[..., None]:
    def run(parameters: list[Tensor], *lists: Any, **kwargs: Any) -> None:
        layouts = [_layout(p, func) for p in parameters]
        named = {name: _locals(value, layouts) for name, value in kwargs.items()}
        func(*[_locals(value, layouts) for value in (parameters, *lists)], **named)

    return run


def _layout(parameter: Tensor, func: Callable[..., Any]) -> Layout | None:
    if not isinstance(parameter, DTensor):
        return None
    layout: Layout = parameter._spec.layout
    if layout.partial:
        raise UnsupportedError(
            f"{function_name(func)}: a parameter is laid out as {layout}; its terms cannot be "
            "updated one by one. Redistribute it to Replicate() or Shard(), or use fused=False."
        )
    return layout


def _locals(value: Any, layouts: list[Layout | None]) -> Any:
    """The local tensors of a list that has one entry for each parameter, in their layouts."""
    if isinstance(value, DTensor):
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
