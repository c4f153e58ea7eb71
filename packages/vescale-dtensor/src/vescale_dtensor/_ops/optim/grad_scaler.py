"""Unscales gradients and notices infinities, as `torch.amp.GradScaler` asks.

An infinity in one rank's shard has to be noticed by every rank: whether the optimizer steps is
decided in Python, and must not be decided differently around the collectives that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import all_reduce, group_of

from vescale_dtensor._autograd.leaf_gradient import owner_of
from vescale_dtensor._autograd.redistribute import replicated
from vescale_dtensor._dispatch.execute import after_mutation, local_of
from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._layout.layout import Layout, axes_in
from vescale_dtensor._planning.plan import function_name
from vescale_dtensor._tensor.copied_views import check_writable
from vescale_dtensor._tensor.dtensor import DTensor


def _unscale(func: Callable[..., None]) -> Callable[..., None]:
    """`_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)`, in place."""

    def run(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
        for gradient in gradients:
            check_writable(gradient, function_name(func))
            _reduce_gradient(gradient)
        layouts = [g._spec.layout for g in gradients if isinstance(g, DTensor)]
        if not layouts or any(layout.partial for layout in layouts):
            # Partial sums may be finite where their total is not.
            given = (gradients, found_inf, inv_scale)
            fallback(func, given, {})
            return
        flag, factor = local_of(found_inf), inv_scale
        if isinstance(factor, DTensor):
            factor = replicated(factor)._local_tensor
        # All gradients are checked before any mesh reduces the flag: what one mesh learns, the next
        # one passes on to ranks that the first does not have.
        func([local_of(gradient) for gradient in gradients], flag, factor)
        for mesh, axes in _communication_axes(layouts):
            flag.copy_(all_reduce(flag, group_of(mesh, axes), op="max"))
        for gradient in (*gradients, found_inf):
            after_mutation(gradient)

    return run


def _reduce_gradient(gradient: Tensor) -> None:
    """Reduce a partial gradient, and keep the total: unscaling is recorded on the total only."""
    if isinstance(gradient, DTensor) and gradient._spec.layout.partial:
        owner = owner_of(gradient)
        if owner is not None:
            owner.reduce()


def _communication_axes(layouts: list[Layout]) -> list[tuple[DeviceMesh, tuple[int, ...]]]:
    """The meshes and axes over which the flag is reduced; small meshes first."""
    sharded: dict[DeviceMesh, int] = {}
    for layout in layouts:
        sharded[layout.mesh] = sharded.get(layout.mesh, 0) | (layout.active & ~layout.replicated)
    if len(sharded) == 1:
        # Ranks along a replicated axis saw the same shards.
        return [(mesh, axes_in(mask)) for mesh, mask in sharded.items() if mask]
    return [
        (mesh, tuple(range(mesh.ndim))) for mesh in sorted(sharded, key=lambda mesh: mesh.size())
    ]


_FUNC: Any = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
HANDLERS: dict[Any, Callable[..., Any]] = {} if _FUNC is None else {_FUNC: _unscale(_FUNC)}
