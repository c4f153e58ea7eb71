"""From tensors to Python: `.item()`, `float()`, `.tolist()`, `.numpy()`: global, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._autograd.function_results import note_plain
from vescale_dtensor._autograd.local_use import local_outside_autograd
from vescale_dtensor._autograd.redistribute import replicated
from vescale_dtensor._errors import UnsupportedError
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


def _refused(what: str) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"{what} of a DTensor: it has no memory of its own. Use x.to_local() for this rank's "
            "piece or x.full_tensor() for the whole; vescale_ckpt.save writes sharded tensors."
        )

    return run


_VALUES = "item tolist __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__"
_DOORS = """
mutable_data_ptr untyped_storage storage storage_type storage_offset
__reduce_ex__ __reduce__ __setstate__ __dlpack__ __dlpack_device__
share_memory_ is_shared set_ resize_ resize_as_ as_strided_ _typed_storage
"""

HANDLERS: dict[Any, Callable[..., Any]] = {
    **{
        getattr(torch.Tensor, name): _of_replicated(name)
        for name in _VALUES.split()
        if hasattr(torch.Tensor, name)
    },
    **{
        getattr(torch.Tensor, name): _refused(name)
        for name in _DOORS.split()
        if hasattr(torch.Tensor, name)
    },
    torch.Tensor.numpy: _numpy,
    # Of a view these read memory around it, which only one device has.
    **{
        getattr(place, name): _refused(name)
        for name in ("as_strided_scatter",)
        for place in (torch, torch.Tensor)
        if hasattr(place, name)
    },
}
