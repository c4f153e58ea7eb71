"""Conversions to and from torch's own DTensor: the same local data in another wrapper.

Gradients follow the typed rule of both sides: the cotangent of `Shard` is `Shard`, that of
`Replicate` and of a partial sum is `Replicate`. So no conversion communicates, but that of a leaf's
gradient, which is reduced first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import tensor as torch_dtensor

from vescale_dtensor._autograd.conversion import from_agreed_local, to_local
from vescale_dtensor._autograd.grad_property import share_gradient
from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._layout.derived_placements import as_placement
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.mesh import axis_names, is_ascending
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import TORCH_NAMES, Partial, Replicate, Shard, StridedShard
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import torch_strided_shard


def to_torch(tensor: DTensor) -> torch_dtensor.DTensor:
    """Convert to torch's DTensor; see `DTensor.to_torch`."""
    if tensor._grad_of is not None:
        share_gradient(tensor)  # may reduce it, which changes its layout
    layout = tensor._spec.layout
    placements = [_torch_placement(p, layout) for p in layout.placements]
    _check_order(layout, "to_torch")
    local = to_local(tensor, None)
    _check_gradient(local, layout, "to_torch")
    shape = tensor._spec.shape
    # Shape and strides are given: torch would infer them from the local tensor, as if shards were
    # even. `run_check` would communicate.
    return torch_dtensor.DTensor.from_local(
        local,
        layout.mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=tensor._spec.tensor_meta.stride,
    )


def from_torch(tensor: Tensor) -> DTensor:
    """Convert from torch's DTensor; see `DTensor.from_torch`."""
    if not isinstance(tensor, torch_dtensor.DTensor):
        raise LayoutError(
            f"from_torch: expected a torch.distributed.tensor.DTensor, found "
            f"{type(tensor).__name__}; use distribute_tensor() or DTensor.from_local()"
        )
    mesh = tensor.device_mesh
    placements = [as_placement(p) for p in tensor.placements]
    layout = Layout.of(mesh, placements)
    _check_order(layout, "from_torch")
    expected = [_of_gradient(p) for p in tensor.placements]
    # Stated, not left to torch's default: the gradient's layout is what both sides have to agree
    # on.
    local: Any = tensor.to_local(grad_placements=expected)
    if hasattr(local, "wait"):  # torch's redistribute(async_op=True) has not been waited for
        local = local.wait()
    _check_gradient(local, layout, "from_torch")
    # torch's DTensor has the global shape and strides, so no rank has to ask another.
    return from_agreed_local(local, mesh, placements, shape=tensor.shape, stride=tensor.stride())


def _torch_placement(placement: Placement, layout: Layout) -> torch_dtensor.Placement:
    """Convert one of our placements to torch's.

    Raises:
        UnsupportedError: torch has no equal of it.
    """
    if isinstance(placement, Shard):
        return torch_dtensor.Shard(placement.dim)
    if isinstance(placement, Replicate):
        return torch_dtensor.Replicate()
    if isinstance(placement, Partial) and placement.reduce_op != "norm2":
        return torch_dtensor.Partial(TORCH_NAMES.get(placement.reduce_op, placement.reduce_op))
    if isinstance(placement, StridedShard) and torch_strided_shard is not None:
        made: Any = torch_strided_shard
        strided: torch_dtensor.Placement = made(placement.dim, split_factor=placement.split_factor)
        return strided
    raise UnsupportedError(
        f"to_torch of {layout}: torch has no placement for {placement}; "
        "redistribute to Shard() or Replicate() first"
    )


def _of_gradient(placement: torch_dtensor.Placement) -> torch_dtensor.Placement:
    """Return the placement of the gradient: replicated where the tensor is partial."""
    return torch_dtensor.Replicate() if placement.is_partial() else placement


def _check_order(layout: Layout, what: str) -> None:
    """Refuse shards where torch's collectives take them in another order than the mesh has."""
    for axis, placement in enumerate(layout.placements):
        if placement.is_sharded() and not is_ascending(layout.mesh, axis):
            raise UnsupportedError(
                f"{what} of {layout}: along axis {axis_names(layout.mesh)[axis]!r} the ranks do "
                "not ascend, and torch's DTensor takes shards in the order of its groups, which "
                "are sorted. Make the mesh of ascending ranks, or with preserve_rank_order=True "
                "(torch 2.15)"
            )


def _check_gradient(local: Tensor, layout: Layout, what: str) -> None:
    """Refuse partial tensors but sums: only a sum's gradient means the same on both sides."""
    if not (local.requires_grad and torch.is_grad_enabled()):
        return
    for placement in layout.placements:
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            raise UnsupportedError(
                f"{what} of {layout} with requires_grad: the gradient of a {placement} is not "
                "passed on. Redistribute to Replicate() first, or detach()."
            )
