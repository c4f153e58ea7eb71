"""What would see a wrapper where there is data only below: clear errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._torch_compat import without_overrides


def _refused(what: str) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"{what} with a DTensor. Run it on local tensors: x.to_local() for this rank's piece, "
            "x.full_tensor() for the whole."
        )

    return run


def _is_contiguous(self: Tensor, *args: Any, **kwargs: Any) -> bool:
    """`Tensor.is_contiguous`: the first question that FSDP2 asks of a parameter.

    It would go on to cut the parameter into chunks and to keep another one on every rank. That is
    not one program on all ranks, so what follows would hang.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("vescale_dtensor"):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None and frame.f_globals.get("__name__", "").startswith(_FSDP):
        raise UnsupportedError(
            f"fully_shard on {self!r}: FSDP2 knows torch's DTensor only. Convert parameters with "
            "x.to_torch() before, or shard them with redistribute()."
        )
    with without_overrides():
        return self.is_contiguous(*args, **kwargs)


_FSDP = "torch.distributed.fsdp"
_FORWARD_AD = ("_make_dual", "_unpack_dual", "_fw_primal")

HANDLERS: dict[Any, Callable[..., Any]] = {
    getattr(torch, name): _refused("forward-mode differentiation (torch.func.jvp, make_dual)")
    for name in _FORWARD_AD
    if hasattr(torch, name)
} | {torch.Tensor.is_contiguous: _is_contiguous}
