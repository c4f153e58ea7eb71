"""Sums over the shards become `.grad` of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vescale_dtensor import DTensor, Partial, Replicate
from vescale_dtensor.storage import local_leaf

from vescale_parallel._common.gradient_dtypes import gradient_dtype
from vescale_parallel._common.mesh import mesh_sizes
from vescale_parallel._invariant.bundle import Bundle, even_parts, row_major, sum_dtype
from vescale_parallel._invariant.resolve import InvariantRow
from vescale_parallel._invariant.shard_gradients import ShardGradients
from vescale_parallel._zero.flat_buffer import FlatBuffer
from vescale_parallel._zero.schedule import Schedule


@dataclass(frozen=True)
class Destination:
    """A bundle, and where its sums go.

    Attributes:
        bundle: whose gradients lie where.
        shapes: local shapes of its parameters on this rank.
        partial: for each parameter, the axes of its mesh over which a shard's gradient is a sum.
        buffer: the flat buffer of which each rank stores a part; None: every rank has all.
    """

    bundle: Bundle
    shapes: tuple[tuple[int, ...], ...]
    partial: tuple[tuple[str, ...], ...]
    buffer: FlatBuffer | None = None

    def deliver(
        self, parameters: Sequence[nn.Parameter], arrived: Sequence[bool], summed: Tensor
    ) -> None:
        """Add the sums to `.grad`. Collective where other axes than the batch's owe sums."""
        own = zip(self.bundle.parameters, self._gradients(summed), self.partial, strict=True)
        for number, gradient, partial in own:
            if arrived[number]:
                _add(parameters[number], gradient, partial)

    def _gradients(self, summed: Tensor) -> list[Tensor]:
        """Return the local gradient of each parameter, in the dtype of the sums."""
        if self.buffer is not None:
            return self.buffer.shards_of(summed)
        sized = zip(self.bundle.offsets, self.shapes, strict=True)
        return [summed[at : at + torch.Size(s).numel()].view(s) for at, s in sized]


def _add(parameter: nn.Parameter, local: Tensor, partial: Sequence[str]) -> None:
    assert isinstance(parameter, DTensor)
    # What a unit gave is the gradient of this rank's rows of the other axes: still to be summed
    # there.
    where: list[Any] = [
        Partial() if axis in partial and one == Replicate() else one
        for axis, one in zip(mesh_sizes(parameter.device_mesh), parameter.placements, strict=True)
    ]
    # A copy: a view would keep the memory of all gradients alive as long as one of them.
    own = local.to(gradient_dtype(parameter), copy=True)
    found = DTensor.from_local(
        own, parameter.device_mesh, where, shape=parameter.shape, stride=row_major(parameter.shape)
    )
    before = parameter.grad
    parameter.grad = found if before is None else before + found


def destinations_of(
    collected: ShardGradients, row: InvariantRow, schedule: Schedule | None, over: str
) -> list[Destination]:
    """Return the bundles of a model, the same on every rank and in the same order."""
    found = []
    # A parameter is in one bundle only: in two, it would be added twice.
    in_buffers: set[int] = set()
    for unit in schedule.units if schedule is not None else []:
        axes = tuple(mesh_sizes(unit.mesh))
        for buffer in unit.buffers:
            one = _of_buffer(collected, row, buffer, over, axes)
            in_buffers |= set(one.bundle.parameters)
            found.append(one)
    axes = tuple(mesh_sizes(schedule.root.mesh)) if schedule is not None else ()
    rest: dict[Any, list[int]] = {}
    for number, parameter in enumerate(collected.parameters):
        if number not in in_buffers and parameter.requires_grad:
            # A flat message has one dtype and one device.
            kind = (sum_dtype(parameter.dtype), parameter.device)
            rest.setdefault(kind, []).append(number)
    for (dtype, device), numbers in rest.items():
        found.append(_of_rest(collected, row, numbers, dtype, device, axes))
    return found


def _of_buffer(
    collected: ShardGradients,
    row: InvariantRow,
    buffer: FlatBuffer,
    over: str,
    axes: tuple[str, ...],
) -> Destination:
    plan = buffer.row.plan
    at = row.axes.index(over)
    inner = torch.Size(row.sizes[at + 1 :]).numel()
    # A rank of the group needs the part that its coordinate on the axis `over` stores.
    stored_by = [rank // inner % row.sizes[at] for rank in range(row.ranks)]
    parts = tuple((plan.start(one), plan.start(one) + plan.sizes[one]) for one in stored_by)
    numbers = tuple(collected.number(one) for one in buffer.parameters)
    bundle = Bundle(
        numbers,
        tuple(slot.offset for slot in plan.slots),
        plan.total,
        sum_dtype(buffer.reduce),
        buffer.shard.device,
        parts,
        gathered=False,
    )
    return Destination(bundle, tuple(buffer.shapes), (axes,) * len(numbers), buffer)


def _of_rest(
    collected: ShardGradients,
    row: InvariantRow,
    numbers: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    axes: tuple[str, ...],
) -> Destination:
    locals_ = [_local(collected.parameters[number]) for number in numbers]
    sizes = [one.numel() for one in locals_]
    offsets = tuple(sum(sizes[:at]) for at in range(len(sizes)))
    # Each rank adds one part of the tree, whatever parameters lie in it, so that all have as much
    # to do.
    parts = even_parts(sum(sizes), row.ranks)
    bundle = Bundle(tuple(numbers), offsets, sum(sizes), dtype, device, parts, gathered=True)
    # What came through a unit is a sum over the unit's mesh still; `.grad` was complete.
    owed = tuple(axes if number in collected.in_units else () for number in numbers)
    return Destination(bundle, tuple(tuple(one.shape) for one in locals_), owed)


def _local(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    return local_leaf(parameter)
