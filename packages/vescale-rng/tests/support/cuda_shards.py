"""Draws of the native CUDA policy for several tests: of a global tensor, and of its shards."""

import torch
from rng_pieces import boxes_of, strided
from vescale_rng._cuda import bernoulli as cuda_bernoulli
from vescale_rng._cuda import dropout as cuda_dropout
from vescale_rng._cuda import fill as cuda_fill
from vescale_rng._cuda.dropout_map import DropoutOp
from vescale_rng._cuda.generator_state import CudaPosition
from vescale_rng._layout.fill_plan import plan_for

PLACE = CudaPosition(0xFEDCBA9876543210, 4 * (2**32 - 1))


def global_draw(device, distribution, shape, order, dtype, place=PLACE):
    """What one device draws, and the offset after it."""
    out = strided(shape, order, dtype)
    return out, device.draw(distribution, out, place)


def rank_draw(device, routes, distribution, layout, order, dtype, place=PLACE):
    """What a rank draws, and the offset after it."""
    local = strided(layout.local_shape, order, dtype)
    plan = plan_for(layout, local)
    words = 0
    if plan.numel:
        words = cuda_fill.fill_from(
            plan, distribution, local, place, routes, device, device.threads
        )
    return local, words


def same(local, layout, expected):
    """Whether a rank's part is what one device has there."""
    return all(torch.equal(view, expected[slices]) for slices, view in boxes_of(local, layout))


def dropped(device, routes, layout, order, dtype, p, place=PLACE):
    """The mask of a rank's part of a dropout, and how far the generator is moved."""
    mask = strided(layout.local_shape, order, torch.bool)
    op = DropoutOp(p, dtype, device, device.threads)
    return mask, cuda_dropout.fill_mask_from(mask, op, plan_for(layout, mask), place, routes)


def each(routes, p, layout, dtype, place=PLACE):
    """A rank's part of `bernoulli_` with these probabilities of its own."""
    local = torch.empty(p.shape, dtype=dtype)
    cuda_bernoulli.fill_each_from(plan_for(layout, local), p, local, place, routes)
    return local
