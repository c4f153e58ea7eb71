"""Factories: `*_like` keeps the layout, `new_*` makes a replicated tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import vescale_rng
from torch import Tensor

from vescale_dtensor._autograd.cotangent import cotangent_layout
from vescale_dtensor._dispatch.fallback import as_replicated_result
from vescale_dtensor._layout.rng_layout import random_layout
from vescale_dtensor._ops.common.functions import functions
from vescale_dtensor._ops.common.memory_formats import MEMORY_FORMATS
from vescale_dtensor._tensor.dtensor import DTensor, wrap_as


def _like(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(input: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        layout = cotangent_layout(input._spec.layout, 0)  # a new tensor is not partial
        wanted = kwargs.get("memory_format", torch.preserve_format)
        if wanted is not torch.preserve_format:
            layout = layout.with_order(MEMORY_FORMATS.get(wanted))
        # Detached: the result has no history, whatever the operand has.
        local = func(input._local_tensor.detach(), *args, **kwargs)
        return wrap_as(local, layout, input.shape)

    return made


def _random_like(distribution: Callable[..., Any]) -> Callable[..., Tensor]:
    def made(input: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        requires_grad = kwargs.pop("requires_grad", False)
        generator = kwargs.pop("generator", None)
        chosen = distribution(*args, **{k: kwargs.pop(k) for k in ("low", "high") if k in kwargs})
        # Not torch's own function on the local tensor: every rank would draw for itself.
        empty = cast(DTensor, torch.empty_like(input, **kwargs))
        local = empty._local_tensor
        layout = empty._spec.layout
        rng_layout = random_layout(layout, tuple(empty.shape), local, generator)
        vescale_rng.fill_(local, chosen, rng_layout, generator=generator)
        return empty.requires_grad_() if requires_grad else empty

    return made


def _randint(*args: int, **named: int) -> Any:
    low, high = (
        args if len(args) == 2 else (named.get("low", 0), args[0] if args else named["high"])
    )
    return vescale_rng.RandInt(low, high)


def _new(name: str) -> Callable[..., Tensor]:
    def made(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        local = getattr(self._local_tensor, name)(*args, **kwargs)
        return as_replicated_result(local, self._spec.layout.mesh)

    return made


HANDLERS: dict[Any, Callable[..., Any]] = {
    **{
        func: _like(func)
        for func in functions("zeros_like ones_like empty_like full_like", (torch,))
    },
    torch.rand_like: _random_like(lambda: vescale_rng.Uniform(0.0, 1.0)),
    torch.randn_like: _random_like(lambda: vescale_rng.Normal(0.0, 1.0)),
    torch.randint_like: _random_like(_randint),
    **{
        getattr(torch.Tensor, name): _new(name)
        for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
    },
}
