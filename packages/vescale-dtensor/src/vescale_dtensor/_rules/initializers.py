"""`torch.nn.init`: the elementwise ones are their tensor methods, the rest take the fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import init


def _filled(name: str, *defaults: float) -> Callable[..., Tensor]:
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        values = list(args) or [
            kwargs.get(key, default) for key, default in zip(_NAMES[name], defaults, strict=True)
        ]
        if len(values) < len(defaults):
            values += defaults[len(values) :]
        with torch.no_grad():
            filled: Tensor = getattr(tensor, name)(
                *values, **{k: v for k, v in kwargs.items() if k == "generator"}
            )
        return filled

    return run


_NAMES = {"uniform_": ("a", "b"), "normal_": ("mean", "std"), "fill_": ("val",)}


def _constant(value: float) -> Callable[[Tensor], Tensor]:
    def run(tensor: Tensor) -> Tensor:
        with torch.no_grad():
            return tensor.fill_(value)

    return run


HANDLERS: dict[Any, Callable[..., Any]] = {
    init.uniform_: _filled("uniform_", 0.0, 1.0),
    init.normal_: _filled("normal_", 0.0, 1.0),
    init.constant_: _filled("fill_", 0.0),
    init.ones_: _constant(1.0),
    init.zeros_: _constant(0.0),
}
