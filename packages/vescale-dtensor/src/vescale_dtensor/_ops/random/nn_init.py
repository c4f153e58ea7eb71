"""`torch.nn.init`: elementwise initialisers are their tensor methods, the rest fall back."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod
from typing import Any, Literal

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
        # As in `torch.nn.init`: a leaf that requires grad may be written, and nothing is recorded.
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


def _kaiming_uniform(
    tensor: Tensor,
    a: float = 0,
    mode: Literal["fan_in", "fan_out"] = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """What `nn.Linear` starts with: its bound follows from the global shape alone."""
    mode = mode.lower()  # type: ignore[assignment]
    if tensor.ndim < 2 or 0 in tensor.shape or mode not in ("fan_in", "fan_out"):
        # torch's own words for what it refuses, and its own way of doing nothing.
        stand_in = torch.empty(tensor.shape, device="meta")
        init.kaiming_uniform_(stand_in, a, mode, nonlinearity)
        return tensor
    # Of the global shape: a shard's own fan would give other bounds on other ranks.
    fan = tensor.shape[1 if mode == "fan_in" else 0] * prod(tensor.shape[2:])
    bound = math.sqrt(3.0) * (init.calculate_gain(nonlinearity, a) / math.sqrt(fan))
    with torch.no_grad():
        return tensor.uniform_(-bound, bound, generator=generator)


HANDLERS: dict[Any, Callable[..., Any]] = {
    init.uniform_: _filled("uniform_", 0.0, 1.0),
    init.normal_: _filled("normal_", 0.0, 1.0),
    init.constant_: _filled("fill_", 0.0),
    init.kaiming_uniform_: _kaiming_uniform,
    init.ones_: _constant(1.0),
    init.zeros_: _constant(0.0),
}
