"""Executes a redistribution plan on this rank's local tensor.

Only functional collectives and ordinary torch operations are used, so a redistribution can be
differentiated, twice and more, where its input requires grad. The gradient is the adjoint of the
map from all ranks' inputs to all ranks' outputs. No step writes to its input.
"""

from __future__ import annotations

import math
from functools import singledispatch
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import Group, all_gather, all_to_all_single, group_of

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.layout import Shape
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.placements import ReduceOp
from vescale_dtensor._redistribute.exchange import LocalBox, pack, source_regions, unpack
from vescale_dtensor._redistribute.half_sums import reduce_over, scatter_over, wide_dtype
from vescale_dtensor._redistribute.plan import RedistributionPlan
from vescale_dtensor._redistribute.regions import Regions, count, is_run
from vescale_dtensor._redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    GatherPieces,
    Mask,
    PackedAllGather,
    PackedAllToAll,
    PackedReduceScatter,
    Pad,
    Rearrange,
    ReduceScatter,
    Scale,
    Slice,
    Step,
)
from vescale_dtensor._torch.opmath import to_opmath


def run_redistribution(plan: RedistributionPlan, local: Tensor) -> Tensor:
    """Convert this rank's local tensor from the plan's source layout to its target layout.

    Collective: every rank of the mesh runs its plan, at the same point of the program.

    Args:
        plan: from `plan_redistribution`.
        local: this rank's local tensor, of any strides; it is not changed.

    Returns:
        A contiguous tensor that shares no memory with `local`; if the plan has no steps (then it
        has none on any rank), `local` itself.

    Raises:
        LayoutError: `local` does not have the shape that the source layout gives this rank.
    """
    expected = local_shape(plan.source, plan.shape)
    if tuple(local.shape) != expected:
        raise LayoutError(
            f"redistribution from {plan.source}: of the global shape {list(plan.shape)} this rank "
            f"should hold {list(expected)}, but its tensor is {list(local.shape)}"
        )
    if not plan.steps:
        return local
    if local.is_meta:  # no values: nothing is sent, on any rank
        return local.new_empty(local_shape(plan.target, plan.shape))
    # Collectives send memory as it is, and lazy conjugation or negation is not in memory yet.
    result = local.resolve_conj().resolve_neg()
    if plan.rounding_steps is None:
        for step in plan.steps:
            result = _execute(step, result, plan.mesh)
    else:
        result = _execute_wide(plan, result, plan.rounding_steps)
    # A slice stays a view until something sends it; what is returned is copied once, so that the
    # result shares no memory and a small slice does not keep all of `local` alive.
    return result.clone(memory_format=torch.contiguous_format) if plan.ends_in_view else result


def _execute_wide(plan: RedistributionPlan, x: Tensor, rounding: range) -> Tensor:
    """All steps; halves are float32 from the first reduction to the last, and rounded once."""
    # What one reduction leaves may be too large for a half where the next one's result is not.
    own, wide = x.dtype, wide_dtype(x.dtype)
    for index, step in enumerate(plan.steps):
        if index == rounding.start and wide is not None:
            x = x.to(wide)
        x = _execute(step, x, plan.mesh)
        if index == rounding.stop - 1 and wide is not None:
            x = x.to(own)
    return x


@singledispatch
def _execute(step: Step, x: Tensor, mesh: DeviceMesh) -> Tensor:
    raise AssertionError(f"no execution for {type(step).__name__}")


@_execute.register
def _slice(step: Slice, x: Tensor, mesh: DeviceMesh) -> Tensor:
    return source_regions(x, LocalBox(step.start, step.shape))


@_execute.register
def _all_reduce(step: AllReduce, x: Tensor, mesh: DeviceMesh) -> Tensor:
    group = group_of(mesh, step.axes)
    if step.op == "norm2":
        # Norms do not add up, their squares do; in single precision, where squares of half floats
        # neither overflow nor lose digits.
        return reduce_over(to_opmath(x).square(), group).sqrt().to(x.dtype)
    return reduce_over(x, group, step.op)


@_execute.register
def _reduce_scatter(step: ReduceScatter, x: Tensor, mesh: DeviceMesh) -> Tensor:
    group = group_of(mesh, step.axes)
    # Shared with the packed form below, which scatters a buffer of one dim.
    return _scattered(x, group, step.op, step.dim, step.sizes)


def _scattered(
    x: Tensor, group: Group, op: ReduceOp, dim: int, sizes: tuple[int, ...] | None
) -> Tensor:
    """Reduce-scatter along `dim`, with the detour of norms over their squares."""
    if op == "norm2":
        squares = to_opmath(x).square()
        return scatter_over(squares, group, "sum", dim, sizes).sqrt().to(x.dtype)
    return scatter_over(x, group, op, dim, sizes)


@_execute.register
def _all_gather(step: AllGather, x: Tensor, mesh: DeviceMesh) -> Tensor:
    return all_gather(x, group_of(mesh, step.axes), dim=step.dim, sizes=step.sizes)


@_execute.register
def _gather_pieces(step: GatherPieces, x: Tensor, mesh: DeviceMesh) -> Tensor:
    group = group_of(mesh, step.axes)
    # Flattened: members' boxes differ in several dims, so no single dim can be concatenated.
    flat = all_gather(x.reshape(-1), group, sizes=step.sizes)
    return unpack(flat, step.packing, step.shape)


@_execute.register
def _all_to_all(step: AllToAll, x: Tensor, mesh: DeviceMesh) -> Tensor:
    sizes, send, receive = step.exchange
    # Also with nothing to send or receive: the other members of the group wait for this rank.
    flat = all_to_all_single(pack(x, send), group_of(mesh, step.axes), sizes=sizes)
    return unpack(flat, receive, step.shape)


@_execute.register
def _pad(step: Pad, x: Tensor, mesh: DeviceMesh) -> Tensor:
    sides: list[int] = []  # as torch wants them: the last dim first
    for start, extent, whole in reversed(list(zip(step.start, x.shape, step.shape, strict=True))):
        sides += [start, whole - start - extent]
    return torch.constant_pad_nd(x.contiguous(), sides, _identity(step.identity_of, x.dtype))


def _identity(op: ReduceOp, dtype: torch.dtype) -> int | float:
    """Return the identity element of a reduction, for values of `dtype`."""
    if op in ("sum", "avg", "norm2"):
        return 0
    # On bools max is "or", whose identity is False; min and product are "and".
    if op == "prod" or dtype is torch.bool:
        return int(op != "max")
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


@_execute.register
def _scale(step: Scale, x: Tensor, mesh: DeviceMesh) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        raise LayoutError(
            f"redistribution between Partial(sum) and Partial(avg) of a tensor of {x.dtype}: "
            "integers have no averages. Use Partial(sum), or a floating dtype."
        )
    # Multiply and divide by integers, which every dtype holds exactly, and not by a fraction.
    above, below = step.factor.numerator, step.factor.denominator
    dense = x.contiguous()
    scaled = dense * above if above > 1 else dense
    return scaled / below if below > 1 else scaled


@_execute.register
def _mask(step: Mask, x: Tensor, mesh: DeviceMesh) -> Tensor:
    if step.fill is None:
        return x
    if x.requires_grad:
        # Constant, but still a function of x for autograd: so backward passes here on every rank,
        # and every rank takes part in the collectives behind it.
        return x.contiguous().masked_fill(
            torch.ones((), dtype=torch.bool, device=x.device), step.fill
        )
    return torch.full(x.shape, step.fill, dtype=x.dtype, device=x.device)


@_execute.register
def _rearrange(step: Rearrange, x: Tensor, mesh: DeviceMesh) -> Tensor:
    return _unpack([(_pack(x, step.source), step.target)], step.shape, identity_of=step.identity_of)


@_execute.register
def _packed_reduce_scatter(step: PackedReduceScatter, x: Tensor, mesh: DeviceMesh) -> Tensor:
    packed = _pack(x, step.source)
    own = _scattered(packed, group_of(mesh, step.axes), step.op, 0, step.sizes)
    return _unpack([(own, step.target)], step.shape)


@_execute.register
def _packed_all_gather(step: PackedAllGather, x: Tensor, mesh: DeviceMesh) -> Tensor:
    packed = _pack(x, step.source)
    everything = all_gather(packed, group_of(mesh, step.axes), dim=0, sizes=step.sizes)
    return _unpack([(everything, step.target)], step.shape)


@_execute.register
def _packed_all_to_all(step: PackedAllToAll, x: Tensor, mesh: DeviceMesh) -> Tensor:
    send, receive = step.filled
    # Joined as columns: for an empty 1-D tensor the backward of torch.cat makes a gradient without
    # history, which would separate a second backward from the collectives.
    runs = [_pack(x, regions).reshape(-1, 1) for regions in send]
    # With nothing to send, an empty part of x: it keeps this rank in the graph of the others' data.
    flat = torch.cat(runs).view(-1) if runs else x.reshape(-1)[:0]
    arrived = all_to_all_single(flat, group_of(mesh, step.axes), sizes=step.sizes)
    if not receive:
        return _unpack([(arrived, ())], step.shape)
    parts = torch.split(arrived, [count(regions) for regions in receive])
    return _unpack(list(zip(parts, receive, strict=True)), step.shape)


def _pack(x: Tensor, regions: Regions) -> Tensor:
    """Return the elements at `regions`, in order, as one dim."""
    # Regions are offsets into a contiguous tensor; a slice before this step may have left a view.
    x = x.contiguous()
    if not regions:
        return x.reshape(-1)[:0]
    # `as_strided` counts from the storage, not from the tensor.
    start = x.storage_offset()
    runs = [x.as_strided(r.shape, r.strides, start + r.offset).reshape(-1) for r in regions]
    # One region at equal distances is still strided after `reshape`, and has to be packed.
    return torch.cat(runs) if len(runs) > 1 else runs[0].contiguous()


def _unpack(
    parts: list[tuple[Tensor, Regions]], shape: Shape, *, identity_of: ReduceOp | None = None
) -> Tensor:
    """Return the tensor of `shape` with the elements of every part at its regions.

    The result depends on the parts in autograd's graph, also where it takes no element of them:
    their backward is a collective in which this rank has to take part.
    """
    numel = prod(shape)
    inert = 0 if identity_of is None else _identity(identity_of, parts[0][0].dtype)
    filled = [(part, regions) for part, regions in parts if regions]
    # Nothing arrives here: padding the (empty) part gives the fill values, and keeps its history.
    if not filled:
        return torch.constant_pad_nd(parts[0][0], (0, numel), inert).reshape(shape)
    first, regions = filled[0]
    # The first part alone fills the result in order: a view does.
    if is_run(regions) and count(regions) == numel:
        return first.reshape(shape)
    result = first.new_empty(shape) if identity_of is None else first.new_full(shape, inert)
    for part, regions in filled:
        runs = torch.split(part, [region.numel for region in regions])
        for region, run in zip(regions, runs, strict=True):
            # In place, on a tensor made just here: `copy_` records the parts in the graph of
            # `result`.
            place = result.as_strided(region.shape, region.strides, region.offset)
            place.copy_(run.view(region.shape))
    return result
