"""Clear errors for functions that need real storage behind the wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._ops.common.functions import entries, functions
from vescale_dtensor._torch.call_site import integration


def _refused(message: str) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(message + integration())

    return run


_FORWARD_MODE = (
    "forward-mode differentiation (torch.func.jvp, make_dual) with a DTensor. Run it on local "
    "tensors: x.to_local() for this rank's piece, x.full_tensor() for the whole."
)
_NO_MEMORY = (
    "{} of a DTensor: it has no memory of its own. Use x.to_local() for this rank's piece or "
    "x.full_tensor() for the whole. vescale_ckpt.save and torch.distributed.checkpoint.save write "
    "sharded tensors; in the background vescale_ckpt.async_save does, and torch's async_save takes "
    "vescale_dtensor.state_dict.as_torch(state). What saves as one device does (save_pretrained) "
    "takes state_dict=vescale_dtensor.state_dict.full_state_dict(model)."
)
_FORWARD_AD = "_make_dual _unpack_dual _fw_primal"
_DOORS = """
mutable_data_ptr untyped_storage storage storage_type storage_offset
__dlpack__ __dlpack_device__
share_memory_ is_shared set_ resize_ resize_as_ as_strided_ _typed_storage
"""
# Of a view this reads memory around it, which only one device has.
_BEYOND = "as_strided_scatter"

HANDLERS: dict[Any, Callable[..., Any]] = {
    **entries(_FORWARD_AD, _refused(_FORWARD_MODE), (torch,)),
    **{
        func: _refused(_NO_MEMORY.format(func.__name__))
        for func in functions(_DOORS, (torch.Tensor,)) + functions(_BEYOND, (torch, torch.Tensor))
    },
}
