"""Dropout of a shard of a tensor on CUDA: the mask of one device, and its arithmetic."""

from typing import Any

import torch

from vescale_rng._cuda import generator_state as cuda_state
from vescale_rng._cuda.device import cuda_device, threads_of
from vescale_rng._cuda.dropout_check import DropoutRoutes, dropout_routes_of
from vescale_rng._cuda.dropout_draw import by_kernel, waves_of
from vescale_rng._cuda.dropout_map import DropoutOp, DropoutShape, scales, vector_of
from vescale_rng._cuda.fill import Place, copy_windows
from vescale_rng._cuda.generator_state import GraphGenerator
from vescale_rng._errors import DeviceError
from vescale_rng._layout.fill_plan import FillPlan, plan_for
from vescale_rng._layout.layout import ShardLayout
from vescale_rng._layout.local_like import make_like


def dropout(
    local: torch.Tensor,
    p: float,
    layout: ShardLayout,
    generator: torch.Generator | GraphGenerator | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute this rank's part of `native_dropout(x, p, True)`: the result and the mask.

    Args:
        local: this rank's elements, on CUDA.
        p: probability of an element to be zeroed.
        layout: which they are, of a tensor with elements.
        generator: of the same device; None is torch's default, the only one that torch's own
            dropout knows.
    """
    if p == 1:
        # On CUDA torch draws nothing here.
        result, mask = torch.native_dropout(local, p, True)
        return result, mask
    index = local.device.index
    # The mask has the input's memory order, and elements are numbered in that order.
    mask, held = make_like(local, layout, torch.bool)
    plan = plan_for(held, mask)
    op = DropoutOp(p, local.dtype, cuda_device(index), threads_of(local.device))
    routes = dropout_routes_of(index)
    if isinstance(generator, GraphGenerator):
        generator.offset.add_(fill_mask_from(mask, op, plan, generator, routes))
    else:
        generator = generator or cuda_state.default_of(local.device)
        place = cuda_state.read(generator)
        words = fill_mask_from(mask, op, plan, place, routes)
        cuda_state.write(generator, place.after(words))
    return scaled(local, mask, p), mask


def words_of_dropout(numel: int, threads: int) -> int:
    """Tell how far a dropout of `numel` elements moves a CUDA generator, in words."""
    return DropoutShape(1, threads, numel).segments.words if numel else 0


def fill_mask_from(
    mask: torch.Tensor, op: DropoutOp, plan: FillPlan, place: Place, routes: DropoutRoutes
) -> int:
    """Draw what is kept of a rank's part; how far the global op moves a generator."""
    widest, why = routes.route(op.dtype)
    drop = DropoutShape(vector_of(plan.numel, widest), op.threads, plan.numel)
    if not why:
        by_kernel(plan.layout, drop, op, place, mask)
    elif isinstance(place, GraphGenerator) or op.threads != op.device.threads:
        raise DeviceError(
            f"dropout for {op.dtype} on {op.device.device}: {why}, and without it torch can "
            "neither draw from a GraphGenerator nor the numbers of a GPU with other threads"
        )
    else:
        copy_windows(drop.order(plan.layout), drop.wave, waves_of(drop, op, place, widest), mask)
    return drop.segments.words


def scaled(local: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Apply a mask as `native_dropout` does, with its derivative."""
    result: torch.Tensor = _ScaledMask.apply(local, mask, p)  # type: ignore[no-untyped-call]
    return result


class _ScaledMask(torch.autograd.Function):
    """Forward and backward both multiply by the mask, and by scales that may round apart."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        # torch's backward op is the product of input, mask and scale in one kernel: what the fused
        # forward computes once its mask is known.
        forward, ctx.scale = scales(p, local.dtype)
        result: torch.Tensor = torch.ops.aten.native_dropout_backward(local, mask, forward)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        # An op of torch with a derivative of its own: so there is a second one here as well.
        return torch.ops.aten.native_dropout_backward(gradients[0], mask, ctx.scale), None, None
