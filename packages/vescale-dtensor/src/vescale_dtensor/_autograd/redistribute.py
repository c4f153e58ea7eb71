"""Redistribution of DTensors, differentiable: the data moves, one autograd node takes it back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.local_use import (
    join_hidden_node,
    local_for_use,
    local_outside_autograd,
)
from vescale_dtensor._autograd.prepared import one_mesh, prepared_redistribution
from vescale_dtensor._autograd.uses import (
    UseAliases,
    fork_uses,
)
from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._layout.layout import ById, Layout, normalized
from vescale_dtensor._layout.mesh import describe
from vescale_dtensor._layout.placements import Replicate
from vescale_dtensor._redistribute.execute import run_redistribution
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.observers import notify_redistribution, observers
from vescale_dtensor._torch.compat import materialized


def redistributed(
    tensor: DTensor, target: Layout, backward_dtype: torch.dtype | None = None
) -> DTensor:
    """The tensor in the target layout (its memory order is kept). Collective, differentiable.

    Its gradient is sent in `backward_dtype`; default: in the tensor's dtype.
    """
    if torch.is_grad_enabled():
        join_hidden_node(tensor)
    else:
        local_outside_autograd(tensor)
    source = tensor._spec.layout
    if _is_same(source, target):
        return tensor
    # A gradient that owes a sum is not moved as it is: its total is taken and kept, so the next
    # op finds it, and torch's accumulation goes on from there.
    owner = None if tensor._grad_of is None else tensor._grad_of()
    if owner is not None and source.partial and not tensor._local_tensor.requires_grad:
        owner.reduce()
        source = tensor._spec.layout
        if _is_same(source, target):
            return tensor
    local = tensor._local_tensor
    move = prepared_redistribution(tensor._spec.base, target)
    if observers:
        notify_redistribution(move.plan)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return wrap(run_redistribution(move.plan, materialized(local.detach())), move.spec)
    # The data moves outside of autograd; the shared-use node that follows is the node of this move,
    # so its backward sees the cotangents of all aliases at once, and sends them in one collective.
    source_varying, reduction = move.for_backward(local.is_leaf, backward_dtype)
    with torch.no_grad():
        data = run_redistribution(move.plan, materialized(local.detach()))
    shape = move.plan.shape
    outputs = fork_uses(local_for_use(tensor, source_varying), data, move.masks, reduction, shape)
    result = wrap(outputs[0], move.spec)
    # The first alias is the tensor itself: whoever uses the local uses an alias, too.
    result._use_aliases = UseAliases(outputs[0], dict(zip(move.masks, outputs, strict=True)))
    return result


def _is_same(source: Layout, target: Layout) -> bool:
    return source.placements == target.placements and one_mesh(source, target)


def redistribute_to(
    tensor: DTensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[object] | None,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """See `DTensor.redistribute`."""
    mesh = tensor._spec.layout.mesh
    if device_mesh is not None and device_mesh != mesh:
        mesh = device_mesh
    if placements is None:
        raise LayoutError(
            f"redistribute of {tensor!r}: give placements, one per axis of {describe(mesh)}"
        )
    if async_op:
        raise UnsupportedError(
            f"redistribute(async_op=True) of {tensor!r}: a DTensor is always ready to be used. "
            "Leave async_op out, or call collectives of your own on x.to_local()."
        )
    target = _target(ById(mesh), tuple(placements), tensor._spec.ndim)
    if forward_dtype is backward_dtype is None:
        return redistributed(tensor, target)
    wire = backward_dtype or tensor.dtype
    if forward_dtype is not None:
        tensor = tensor.to(forward_dtype)
    return redistributed(tensor, target, None if wire == tensor.dtype else wire)


@lru_cache(maxsize=4096)
def _target(mesh: ById, placements: tuple[object, ...], ndim: int) -> Layout:
    return Layout.of(mesh.mesh, normalized(placements, ndim))


def replicated(tensor: DTensor) -> DTensor:
    """The tensor, whole on every rank. Collective."""
    layout = tensor._spec.layout
    return redistributed(tensor, layout.with_placements([Replicate()] * len(layout.placements)))
