"""Clipping by a norm that has the same bits on any number of data-parallel ranks.

A norm of shards is a sum over ranks, in an order that follows their number: torch's own
`clip_grad_norm_` is right where gradients are whole, and differs in the last bits where `zero`
stores shards of them. Here each gradient is made whole over the ranks that share it, unit by unit,
and its norm is that of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from vescale_comm import all_gather
from vescale_dtensor import DTensor

from vescale_parallel._invariant.bundle import row_major
from vescale_parallel._invariant.step import InvariantStep
from vescale_parallel._step.forward_backward import step_of
from vescale_parallel._zero.flat_buffer import FlatBuffer
from vescale_parallel._zero.unit import Unit, UnitParameter


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of a model to a norm, as `torch.nn.utils.clip_grad_norm_` does.

    With `deterministic="dp-invariant"` the norm, and what it scales, has the same bits on any
    number of data-parallel ranks; where `zero` stores shards of gradients that costs one all-gather
    for each of its buffers. Any other model is given to torch's function.

    Args:
        model: what `parallelize` returned.
        max_norm: the largest norm that is left as it is.
        norm_type: the order of the norm.

    Returns:
        The norm of all gradients before.
    """
    step = step_of(model)
    if not isinstance(step, InvariantStep):
        found: Tensor = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        return found
    norms = [_plain(torch.linalg.vector_norm(one, norm_type)) for one in _whole_gradients(step)]
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    norm = torch.linalg.vector_norm(torch.stack([one.to(device) for one in norms]), norm_type)
    # As torch has it, the small number included: other models are clipped by torch's own function.
    factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return cast(Tensor, norm)


def _plain(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def _whole_gradients(step: InvariantStep) -> Iterator[Tensor]:
    """Yield each gradient, whole over the ranks that share it. Collective.

    In an order, and over units, that do not depend on which rank stores what.
    """
    stored: dict[int, Tensor] = {}
    for unit in step.schedule.units if step.schedule is not None else []:
        held = iter(unit.held)
        for buffer in unit.buffers:
            stored |= _of_buffer(unit, buffer, [next(held) for _ in buffer.parameters])
    for parameter in step.collected.parameters:
        if parameter.grad is not None:
            yield stored.get(id(parameter), parameter.grad)


def _of_buffer(unit: Unit, buffer: FlatBuffer, held: list[UnitParameter]) -> dict[int, Tensor]:
    plan = buffer.row.plan
    # Zeros where there is no gradient: every rank takes part, and a part of nobody's is not looked
    # at.
    shard = buffer.shard.new_zeros(plan.sizes[buffer.group.rank])
    for into, parameter in zip(buffer.shards_of(shard), buffer.parameters, strict=True):
        if parameter.grad is not None:
            into.copy_(_local(parameter.grad))
    whole = all_gather(shard, buffer.group, sizes=list(plan.sizes))
    found: dict[int, Tensor] = {}
    for one, slot, shape in zip(held, plan.slots, buffer.shapes, strict=True):
        if one.stored.grad is not None:
            local = whole[slot.offset : slot.offset + torch.Size(shape).numel()].view(shape)
            size, strides = one.stored.shape, row_major(one.stored.shape)
            where: Any = one.placements
            found[id(one.stored)] = DTensor.from_local(
                local, unit.mesh, where, shape=size, stride=strides
            )
    return found


def _local(gradient: Any) -> Tensor:
    found: Tensor = gradient.to_local()
    return found
