"""Factories: `*_like` keeps the layout, and so does `new_*` of the same shape; others replicate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
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
        if not local.is_meta:
            rng_layout = random_layout(layout, tuple(empty.shape), local, generator)
            vescale_rng.fill_(local, chosen, rng_layout, generator=generator)
        return empty.requires_grad_() if requires_grad else empty

    return made


def _randint(*args: int, **named: int) -> Any:
    low, high = (
        args if len(args) == 2 else (named.get("low", 0), args[0] if args else named["high"])
    )
    return vescale_rng.RandInt(index(low), index(high))


def _new(name: str) -> Callable[..., Tensor]:
    def made(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        local = getattr(self._local_tensor, name)(*args, **kwargs)
        return as_replicated_result(local, self._spec.layout.mesh)

    return made


def _new_of_size(name: str) -> Callable[..., Tensor]:
    replicated = _new(name)

    def made(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        size, rest = _size_and_rest(name, args, kwargs)
        if size != tuple(self.shape):
            return replicated(self, *args, **kwargs)
        # A new tensor of the same shape is most often one to be combined with this one (a state of
        # an optimizer, a buffer): it lies alike. Row-major, as on one device, and not partial.
        layout = cotangent_layout(self._spec.layout, 0).with_order(None)
        named = {key: value for key, value in kwargs.items() if key != "size"}
        local = self._local_tensor.detach()
        return wrap_as(getattr(local, name)(local.shape, *rest, **named), layout, size)

    return made


def _size_and_rest(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...] | None, tuple[Any, ...]]:
    """The size that a factory is given, and what follows it by position; None: it has none here."""
    if "size" in kwargs:
        size, rest = kwargs["size"], args
    elif args and isinstance(args[0], Sequence):
        size, rest = args[0], args[1:]
    elif name == "new_full":
        return None, args  # it takes a sequence only: torch has the words for its error
    else:
        size, rest = args, ()
    try:
        return tuple(index(extent) for extent in size), rest
    except TypeError:
        return None, rest


HANDLERS: dict[Any, Callable[..., Any]] = {
    **{
        func: _like(func)
        for func in functions("zeros_like ones_like empty_like full_like", (torch,))
    },
    torch.rand_like: _random_like(lambda: vescale_rng.Uniform(0.0, 1.0)),
    torch.randn_like: _random_like(lambda: vescale_rng.Normal(0.0, 1.0)),
    torch.randint_like: _random_like(_randint),
    **{
        getattr(torch.Tensor, name): _new_of_size(name)
        for name in ("new_zeros", "new_ones", "new_empty", "new_full")
    },
    torch.Tensor.new_tensor: _new("new_tensor"),
}
