"""Converts tensors to Python (`.item()`, `.tolist()`, `.numpy()`): global, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.function_results import note_plain
from vescale_dtensor._autograd.local_use import local_outside_autograd
from vescale_dtensor._autograd.redistribute import replicated
from vescale_dtensor._tensor.dtensor import DTensor, wrap


def _replicated_local(tensor: DTensor) -> Tensor:
    if not torch.is_grad_enabled():
        local_outside_autograd(tensor)
        note_plain()
    # Detached and not under no_grad: that would look like the inside of a custom Function.
    detached = wrap(tensor._local_tensor.detach(), tensor._spec)
    detached._lineage = tensor._lineage
    # Communicates if sharded or partial: Python then branches on the same value on all ranks.
    return replicated(detached)._local_tensor


def _of_replicated(name: str) -> Callable[..., Any]:
    def run(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(_replicated_local(self), name)(*args, **kwargs)

    return run


def _numpy(self: DTensor, *, force: bool = False) -> Any:
    if self.requires_grad and not force:
        raise RuntimeError(
            "Can't call numpy() on a DTensor that requires grad. Use tensor.detach().numpy()."
        )
    return _replicated_local(self).numpy(force=force)


_VALUES = "item tolist __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__"

HANDLERS: dict[Any, Callable[..., Any]] = {
    **{
        getattr(torch.Tensor, name): _of_replicated(name)
        for name in _VALUES.split()
        if hasattr(torch.Tensor, name)
    },
    torch.Tensor.numpy: _numpy,
}
