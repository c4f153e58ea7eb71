"""Casts, copies and formats that change nothing: they return the same tensor, as torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.dispatch import by_rule
from vescale_dtensor._dispatch.registry import rule_of
from vescale_dtensor._ops.common.functions import functions, getter
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import (
    fake_tensors,
    no_dispatch_modes,
    no_torch_function,
    without_overrides,
)


def _by_rule(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return by_rule(rule_of(func), func, args, kwargs)


def _cast(func: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, DTensor):
            return _by_rule(func, (self, *args), kwargs)
        if "memory_format" in kwargs:
            return _formatted(func, self, args, **kwargs)
        # Torch parses the arguments, for a tensor without elements: it has dozens of forms.
        probe = _empty_like(self)
        named = {name: _empty_like(value) for name, value in kwargs.items()}
        after = func(probe, *map(_empty_like, args), **named)
        if after is probe:
            return self  # torch returns the tensor itself, and so aliases must be
        if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
            return self.to(after.device, after.dtype)
        return _by_rule(func, (self, *args), kwargs)

    return run


def _formatted(
    func: Callable[..., Any],
    self: DTensor,
    args: tuple[Any, ...],
    memory_format: torch.memory_format,
    **kwargs: Any,
) -> Any:
    """A cast to a memory format: the tensor itself where torch finds that it has it already."""
    meta = self._spec.tensor_meta
    with no_torch_function(), no_dispatch_modes(), fake_tensors():
        probe = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=self.device)
        after = func(probe, *args, memory_format=memory_format, **kwargs)
    if after is probe:
        return self
    cast = func(self, *args, **kwargs)
    kept = cast is not self and cast.stride() == after.stride()
    return cast if kept else cast.clone(memory_format=memory_format)


def _empty_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(0, dtype=value.dtype, device=value.device)


def _contiguous(
    self: DTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> DTensor:
    with without_overrides():
        lies_so = self.is_contiguous(memory_format=memory_format)  # as on one device
    if lies_so:
        return self
    # Not the local tensor's own `contiguous`, which returns it where the shard has no gaps though
    # the global tensor has some: one device copies.
    return self.clone(memory_format=memory_format)  # type: ignore[return-value]


def _positive(func: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: DTensor) -> DTensor:
        func(input._local_tensor)  # refuses booleans
        return input

    return run


def _of_real(func: Callable[..., Any]) -> Callable[..., Any]:
    """`conj`, `real` and the like, which return the very tensor where it is real."""

    def run(input: DTensor, *, out: torch.Tensor | None = None) -> Any:
        if out is not None:
            return out.copy_(func(input))
        local = input._local_tensor
        lazy = local.is_neg() or local.is_conj()
        unchanged = not lazy if func in _RESOLVING else not (lazy or local.is_complex())
        return input if unchanged else _by_rule(func, (input,), {})

    return run


_CASTS = "to cpu cuda float double half bfloat16 int bool long short char byte type_as"
_CASTS += " cfloat cdouble chalf"
_RESOLVING = frozenset(functions("resolve_conj resolve_neg"))
_OF_REAL = functions("conj conj_physical conj_physical_ resolve_conj resolve_neg real")

HANDLERS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch.Tensor, name): _cast(getattr(torch.Tensor, name)) for name in _CASTS.split()},
    **{func: _positive(func) for func in functions("positive __pos__")},
    **{func: _of_real(func) for func in [*_OF_REAL, getter("real")]},
    torch.Tensor.contiguous: _contiguous,
}
