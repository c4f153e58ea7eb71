"""Clear errors for functions that need real storage behind the wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vescale_dtensor._errors import UnsupportedError


def _refused(what: str) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"{what} with a DTensor. Run it on local tensors: x.to_local() for this rank's piece, "
            "x.full_tensor() for the whole."
        )

    return run


_FORWARD_AD = ("_make_dual", "_unpack_dual", "_fw_primal")

HANDLERS: dict[Any, Callable[..., Any]] = {
    getattr(torch, name): _refused("forward-mode differentiation (torch.func.jvp, make_dual)")
    for name in _FORWARD_AD
    if hasattr(torch, name)
}
