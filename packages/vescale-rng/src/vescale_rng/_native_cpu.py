"""The native policy on CPU: torch draws every number, from its own stream moved into place."""

import torch

from vescale_rng._consumption import Consumption
from vescale_rng._plan import Plan
from vescale_rng._samplers import Op, sampler_of


def run(plan: Plan, consumption: Consumption, op: Op, local: torch.Tensor) -> None:
    """Draw ``op`` into ``local``, and leave its generator behind the whole of it."""
    offset = local.storage_offset()
    if plan.whole:
        box = plan.layout.boxes[0]
        view = local.as_strided(box.shape, box.local_strides, offset + box.local_offset)
        # One device's own call, on a tensor of one device's own strides.
        op.distribution.draw(view, op.generator)
        return
    sampler = sampler_of(op, consumption, plan.longest)
    for window in plan.sweep.windows() if plan.windows is None else plan.windows:
        values = sampler.take(window.start, window.stop)
        for piece in window.pieces:
            place = values.storage_offset() + piece.start - window.start
            drawn = values.as_strided(piece.shape, piece.strides, place)
            place = offset + piece.local_offset
            local.as_strided(piece.shape, piece.local_strides, place).copy_(drawn)
    # Also where there was no window: a rank that holds nothing moves as far as the others.
    sampler.finish()
