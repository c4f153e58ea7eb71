"""Differentiable redistribution of DTensors.

The data is redistributed outside of autograd. The shared-use node that makes the result's aliases
is also the node of the redistribution: its backward sums the cotangents of all uses, and sends the
sum back to the source's layout once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.leaf_gradient import owner_of
from vescale_dtensor._autograd.local_use import (
    join_hidden_node,
    local_for_use,
    local_outside_autograd,
)
from vescale_dtensor._autograd.redistribution_setup import one_mesh, prepared_redistribution
from vescale_dtensor._autograd.uses import (
    UseAliases,
    fork_uses,
)
from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.execution_events import record
from vescale_dtensor._layout.layout import Layout, normalized
from vescale_dtensor._layout.mesh import describe
from vescale_dtensor._layout.placements import Replicate
from vescale_dtensor._layout.spec import spec_of
from vescale_dtensor._redistribute.execute import run_redistribution
from vescale_dtensor._tensor.dtensor import DTensor, wrap
from vescale_dtensor._tensor.lineage import is_trained
from vescale_dtensor._tensor.observers import notify_redistribution, observers
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor._torch.compat import any_requires_grad, materialized
from vescale_dtensor._torch.worlds import on_world_change

is_grad_enabled = torch.is_grad_enabled

# The id of a mesh, a number of dims, and placements as they are passed -> the layout. No other mesh
# can have that id: the layout keeps this one alive.
_targets: BoundedCache[tuple[object, ...], Layout] = BoundedCache(4096)
on_world_change(_targets.clear)


def redistributed(
    tensor: DTensor, target: Layout, backward_dtype: torch.dtype | None = None
) -> DTensor:
    """The tensor in another layout. Collective, differentiable.

    Args:
        tensor: what to redistribute. It is returned itself if it has these placements already.
        target: mesh and placements of the result; the memory order is that of `tensor`.
        backward_dtype: dtype in which the gradient is sent; default: the tensor's.

    Raises:
        UnsupportedError: a gradient is wanted, and a placement on either side has none, as
            `Partial("max")`.
    """
    if is_grad_enabled():
        # `join_hidden_node` written out.
        if tensor._may_have_hidden_node or (
            not tensor._local_tensor.requires_grad and any_requires_grad(tensor)
        ):
            join_hidden_node(tensor)
    else:
        local_outside_autograd(tensor)
    source = tensor._spec.layout
    # Layouts are interned; `_is_same` is written out.
    if source is target or (source.placements == target.placements and one_mesh(source, target)):
        return tensor
    if not source.inside:  # nothing to send or to receive: the others do without this rank
        spec = tensor._spec
        held = target.with_order(source.order)
        return wrap(tensor._local_tensor, spec_of(held, tuple(spec.shape), spec.tensor_meta.dtype))
    # An unreduced gradient of a leaf is reduced in place first: the next op finds the total, and
    # torch's accumulation continues from it. Not a recorded one (create_graph): writing to it in
    # place would invalidate its graph.
    owner = None if tensor._grad_of is None else owner_of(tensor)
    if owner is not None and source.partial and not tensor._local_tensor.requires_grad:
        owner.reduce()
        source = tensor._spec.layout  # which reducing has changed
        if _is_same(source, target):
            return tensor
    local = tensor._local_tensor
    # The base spec: its twin with a known total has the same data, and needs no plan of its own.
    move = prepared_redistribution(tensor._spec.base, target)
    if move.words is not None:
        # What was written to a parameter, or its gradient, shows where it is used: with stages,
        # ranks of other ones do not drop, or step, what they have nothing of.
        by_hand = tensor._part_of is not None or is_trained(tensor)
        record(source.mesh, move.words, 0 if by_hand else tensor._lineage)
    if observers:
        notify_redistribution(move.plan)
    if not (local.requires_grad and is_grad_enabled()):
        moved = wrap(run_redistribution(move.plan, materialized(local.detach())), move.spec)
        moved._lineage = tensor._lineage
        return moved
    # For a leaf, the node may use it varyingly: the contribution then stays partial, and is reduced
    # with those of all other uses.
    source_varying, reduction = move.for_backward(local.is_leaf, backward_dtype)
    with torch.no_grad():
        data = run_redistribution(move.plan, materialized(local.detach()))
    shape = move.plan.shape
    outputs = fork_uses(local_for_use(tensor, source_varying), data, move.masks, reduction, shape)
    result = wrap(outputs[0], move.spec)
    result._lineage = tensor._lineage
    # The first alias is the result's local tensor, so an invariant use of it is an output of the
    # same node as the varying ones.
    result._use_aliases = UseAliases(outputs[0], dict(zip(move.masks, outputs, strict=True)))
    return result


def _is_same(source: Layout, target: Layout) -> bool:
    # Without the memory order: a redistribution keeps that of its source.
    return source.placements == target.placements and one_mesh(source, target)


def redistribute_to(
    tensor: DTensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[object] | None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """See `DTensor.redistribute`."""
    spec = tensor._spec
    mesh = spec.layout.mesh
    if device_mesh is not None and device_mesh != mesh:
        mesh = device_mesh
    if placements is None:
        raise LayoutError(
            f"redistribute of {tensor!r}: give placements, one per axis of {describe(mesh)}"
        )
    key = (id(mesh), spec.ndim, *placements)
    target = _targets.get(key)
    if target is None:
        target = Layout.of(mesh, normalized(tuple(placements), spec.ndim))
        _targets.store(key, target)
    if forward_dtype is backward_dtype is None:
        return redistributed(tensor, target)
    # `forward_dtype` is the result's dtype, as in torch, so it is a cast with a gradient of its
    # own. The gradient of the redistribution is sent in what was the tensor's dtype before it.
    wire = backward_dtype or tensor.dtype
    if forward_dtype is not None:
        tensor = tensor.to(forward_dtype)
    return redistributed(tensor, target, None if wire == tensor.dtype else wire)


def replicated(tensor: DTensor) -> DTensor:
    """The tensor, replicated on every mesh axis. Collective, differentiable."""
    layout = tensor._spec.layout
    return redistributed(tensor, layout.with_placements([Replicate()] * len(layout.placements)))
