"""A deferred tensor as a distributed one, of which each rank makes its own elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor import Placement, distribute_tensor, empty
from vescale_dtensor.storage import local_leaf
from vescale_rng import as_layout

from vescale_parallel._deferred.pieces import piece
from vescale_parallel._deferred.recording import DeferredTensor, value_of
from vescale_parallel._deferred.replay import replay


def distributed(
    tensor: DeferredTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype,
    *,
    row_major: bool,
) -> Tensor:
    """Return what `distribute_tensor` returns for the tensor of one device. No communication.

    Args:
        tensor: the tensor without storage.
        mesh: where to.
        placements: one per axis of the mesh.
        dtype: of the result; values are made in the dtype of the tensor, then converted.
        row_major: whether the result shall be row-major also where the tensor is not.
    """
    value = value_of(tensor)
    meta = value.meta
    # Pieces are those of row-major tensors. Of another memory order, in which it was drawn, it is
    # made whole.
    if not meta.is_contiguous():
        whole = replay(value).contiguous() if row_major else replay(value)
        return distribute_tensor(whole.to(dtype), mesh, placements, src_data_rank=None)
    made = empty(meta.shape, dtype=meta.dtype, device_mesh=mesh, placements=placements)
    # A model that was built on the host may be for a mesh of other devices.
    made = made.to(tensor.device.type) if tensor.device.type != mesh.device_type else made
    piece(value, as_layout(made.__vescale_layout__()), local_leaf(made))
    return made.to(dtype)
