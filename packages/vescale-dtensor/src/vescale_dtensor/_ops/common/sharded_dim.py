"""Helpers for operations that reduce or scan along a sharded dim.

They tell over which mesh axes to communicate, and return a replicated result as a partial sum:
coordinate 0 keeps it and the others hold zeros, so that its gradient is not counted once per rank.
Everything in between is differentiable on every rank, or a collective of backward would wait for
ranks that never call it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vescale_comm import Group, all_gather, group_of

from vescale_dtensor._layout.layout import Layout, axes_in
from vescale_dtensor._layout.local_shards import local_groups, local_shape
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import Partial, Replicate, Shard
from vescale_dtensor._planning import AxisStrategy, Dims, LocalContext, OpCall, Signature, Strategy
from vescale_dtensor._planning.memory_order import without_modes
from vescale_dtensor._redistribute.half_sums import reduce_over, wide_dtype
from vescale_dtensor._torch.compat import any_autocast
from vescale_dtensor._torch.overridable import overridable

Kernel = Callable[[LocalContext, Any, Any], Any]


def sharded_dim_strategy(
    operand: Dims, outputs: Sequence[Dims], dims: Collection[int], partial: Sequence[bool]
) -> Strategy:
    """The candidates of an op that reduces or scans dims of operand 0, sharded ones included.

    Args:
        operand: letters of the operand.
        outputs: letters of the outputs.
        dims: the dims that it reduces or scans.
        partial: per output, whether it is partial where a dim that it lacks is sharded; else it is
            replicated.
    """
    # Sharded along other dims, an op needs nothing of other ranks; `candidates` adds these dims.
    base = Signature((operand,), tuple(outputs), unshardable=frozenset(operand[d] for d in dims))
    pairs = list(zip(outputs, partial, strict=True))
    candidates = [
        AxisStrategy(
            (Shard(d),),
            tuple(_output_placement(operand[d], o, t) for o, t in pairs),
            contiguous_only=True,
        )
        for d in dims
    ]
    strategy = base.strategy()
    return replace(strategy, candidates=(*strategy.candidates, *candidates))


def with_sharded_kernel(
    strategy: Strategy, dims: Collection[int], kernel: Kernel, *, or_empty: bool = False
) -> Strategy:
    """The strategy, whose local call is a kernel where these dims of operand 0 are sharded.

    Elsewhere torch's own function serves; compiled calls then have no kernel to look at each time.

    Args:
        strategy: of an op that looks along these dims.
        dims: the dims.
        kernel: called as `kernel(context, args, kwargs)`.
        or_empty: whether the kernel also serves a rank whose shard has no elements.
    """

    def local(context: LocalContext, args: Any, kwargs: Any) -> Any:
        sharded = sharding_axes(context.input_layout(0), dims)
        if sharded or (or_empty and not args[0].numel()):
            return kernel(context, args, kwargs)
        return context.call.func(*args, **kwargs)

    def bind(context: LocalContext) -> Callable[..., Any] | None:
        # Decided once for these shapes: a rank that has elements pays nothing at each call.
        layout, shape = context.input_layout(0), tuple(context.call.operands[0].shape)
        empty = or_empty and 0 in local_shape(layout, shape)
        return None if empty or sharding_axes(layout, dims) else context.call.func

    return replace(strategy, local=local, specialize=bind)


# Torch has every function for these.
_USUAL = (torch.float32, torch.float64)
_refusals: dict[tuple[Any, ...], bool] = {}
"""Whether torch refuses a function for a dtype, by these."""


def is_refused(call: OpCall) -> bool:
    """Whether torch has not this function for numbers of this kind.

    Then no rule holds, so that every rank runs into torch's error: a kernel that writes it out in
    several steps would give integers something, and torch itself says nothing of an empty shard.
    """
    if all(x.dtype in _USUAL for x in call.operands):
        return False
    given = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.dtype)]
    # Of a tensor without elements torch may have nothing to compute, and nothing to refuse.
    kinds = [(tuple(min(n, 2) for n in x.shape), x.dtype, x.device) for x in call.operands]
    key = (call.func, *kinds, *given, any_autocast())
    if key not in _refusals:
        args, kwargs = call.replaced(
            [torch.ones(extents, dtype=dtype, device=at) for extents, dtype, at in kinds]
        )
        refused = False
        # Hidden from modes: the question is no part of the program that one records or counts.
        with warnings.catch_warnings(), torch.no_grad(), without_modes():
            warnings.simplefilter("ignore")  # of one element: too few degrees of freedom
            try:
                call.func(*args, **kwargs)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                pass  # of these numbers
            except (RuntimeError, ValueError, TypeError):
                refused = True
        _refusals[key] = refused
    return _refusals[key]


def unless_refused(
    strategy: Callable[[OpCall], Strategy | None],
) -> Callable[[OpCall], Strategy | None]:
    """A strategy that holds of numbers for which torch has the function: see `is_refused`."""

    def checked(call: OpCall) -> Strategy | None:
        return None if is_refused(call) else strategy(call)

    return checked


def _output_placement(letter: Any, dims: Dims, partial: bool) -> Placement:
    if letter in dims:
        return Shard(dims.index(letter))
    return Partial() if partial else Replicate()


def sharding_axes(layout: Layout, dims: Collection[int]) -> tuple[int, ...]:
    """The active axes that shard one of these dims."""
    return tuple(
        axis
        for axis in axes_in(layout.active)
        if any(layout.placements[axis].is_sharded(d) for d in dims)
    )


def local_offsets(context: LocalContext) -> tuple[int, ...]:
    """The global index at which this rank's shard of operand 0 begins, per dim.

    It means something for `contiguous_only` dims; of others the shard may be several intervals.
    """
    # Shards of several dims flattened match no candidate, so every group is one dim.
    groups = local_groups(context.input_layout(0), tuple(context.call.operands[0].shape))
    return tuple(group.intervals[0][0][0] for group in groups)


def gather_stacked(x: Tensor, layout: Layout, axes: tuple[int, ...]) -> Tensor:
    """The tensors of all coordinates of these axes along a new first dim. Differentiable.

    They come in mesh order, which is the order of the shards along a dim.
    """
    wide = wide_dtype(x.dtype) if x.requires_grad else None
    if wide is not None:
        # The gradient of a gather is a sum over ranks, which is taken in the dtype that was sent.
        return all_gather(x.unsqueeze(0).to(wide), group_of(layout.mesh, axes)).to(x.dtype)
    return all_gather(x.unsqueeze(0), group_of(layout.mesh, axes))


def sum_over_axes(x: Tensor, layout: Layout, axes: tuple[int, ...]) -> Tensor:
    """The sum over these axes, on every rank. Differentiable."""
    return reduce_over(x, group_of(layout.mesh, axes))


def rank_index(layout: Layout, axes: tuple[int, ...]) -> int:
    """This rank's row in what `gather_stacked` gives."""
    # Row-major over the axes, as the communication group orders its ranks.
    index = 0
    for axis in axes:
        index = index * layout.sizes[axis] + layout.coordinate[axis]
    return index


def as_partial_value(x: Tensor, layout: Layout, axes: tuple[int, ...]) -> Tensor:
    """A replicated value as a partial sum: zeros everywhere but at coordinate 0.

    Returned replicated, its gradient would be counted once per rank.
    """
    if all(layout.coordinate[axis] == 0 for axis in axes):
        return x
    # Not `zeros_like`: the graph has to reach the operands on every rank, or a collective in
    # backward would wait for those that have none. Not `x * 0`, which is NaN where x is infinite.
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)


class _StraightThrough(torch.autograd.Function):
    """The value of one tensor, with the gradient passed to another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, follows: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return None, cotangent


@overridable
def straight_through(value: Tensor, follows: Tensor) -> Tensor:
    """Straight-through: returns `value`, and passes its gradient to `follows` of the same shape."""
    result: Tensor = _StraightThrough.apply(value, follows)  # type: ignore[no-untyped-call]
    return result


def pad_dim(x: Tensor, dim: int, count: int, value: Any = 0) -> Tensor:
    """`x` with so many slices of `value` behind its last one along a dim."""
    return torch.constant_pad_nd(x, [0, 0] * (x.ndim - 1 - dim) + [0, count], value)


def pad_empty_dims(x: Tensor, dims: Collection[int], identity: Any) -> Tensor:
    """`x` with one slice of `identity` along each of these dims that is empty."""
    # Rank-dependent, and local: only the extents that are exchanged have to agree.
    for dim in dims:
        if x.shape[dim] == 0:
            x = pad_dim(x, dim, 1, identity)
    return x


def restore_dims(x: Tensor, dims: Collection[int]) -> Tensor:
    """`x` with the dims that were reduced, of extent one."""
    for dim in sorted(dims):
        x = x.unsqueeze(dim)
    return x


def extreme_identity(dtype: torch.dtype, *, largest: bool) -> Any:
    """The identity element of a maximum, or of a minimum."""
    if dtype is torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -torch.inf if largest else torch.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


class ShardedDims:
    """Dims of operand 0 in a local kernel, and the ranks that share them.

    Attributes:
        context: the call and its plan.
        layout: of the operand.
        axes: the mesh axes that shard these dims.
    """

    def __init__(self, context: LocalContext, dims: Collection[int]) -> None:
        self.context = context
        self.layout = context.input_layout(0)
        self.axes = sharding_axes(self.layout, dims)

    @property
    def func(self) -> Callable[..., Any]:
        """The torch function that was called."""
        return self.context.call.func

    @property
    def group(self) -> Group:
        """The ranks that share the dims."""
        return group_of(self.layout.mesh, self.axes)

    @property
    def rank(self) -> int:
        """This rank's row in what `gather` gives."""
        return rank_index(self.layout, self.axes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Per dim of the operand, the global index at which this rank's shard begins."""
        return local_offsets(self.context)

    def gather(self, x: Tensor) -> Tensor:
        """`x` of all ranks that share the dims, along a new first dim. Differentiable."""
        return gather_stacked(x, self.layout, self.axes)

    def gather_sizes(self, size: int, like: Tensor) -> list[int]:
        """A size of each of those ranks."""
        sizes: list[int] = self.gather(torch.tensor(size, device=like.device)).tolist()
        return sizes

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over those ranks, on each of them. Differentiable."""
        return sum_over_axes(x, self.layout, self.axes) if self.axes else x
