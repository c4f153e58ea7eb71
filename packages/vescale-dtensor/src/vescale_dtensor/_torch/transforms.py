"""Tells whether torch.func or forward mode is active: private API of torch, feature-tested."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Where torch does not tell, each tensor is asked, and none counts as a wrapper of torch.func.
_may_transform: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_transforms: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_is_transformed: Any = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda _: False)


def in_transform() -> bool:
    """Whether a transform of torch.func runs, or a level of forward mode is open."""
    return _transforms() or getattr(forward_ad, "_current_level", -1) >= 0


def is_transformed(tensor: Tensor) -> bool:
    """Whether a plain tensor stands for something else: in vmap, torch.func.grad, forward mode."""
    if _may_transform() and _is_transformed(tensor):
        return True
    # Forward mode has no wrapper: the tangent is asked for, and only while a level is open.
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    dual: Any = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return dual.tangent is not None
