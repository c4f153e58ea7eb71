"""What ops that look along a cut dim have in common: whom they ask, and how a result has terms.

A result that every rank knows is replicated; but a differentiable one has to be a sum of terms, so
that its cotangent is whole on every rank: coordinate 0 keeps it, the others have zeros. Whatever
goes on in between is differentiable on every rank, or a backward collective would wait for some.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from vescale_comm import all_gather, all_reduce, group_of

from vescale_dtensor._dispatch.execute import Run
from vescale_dtensor._layout.layout import Layout, axes_in
from vescale_dtensor._layout.local_shards import held_groups
from vescale_dtensor._layout.placements import Partial, Placement, Replicate, Shard
from vescale_dtensor._planning.strategy import Dims, Row, Signature, Strategy
from vescale_dtensor._torch.overridable import one_step


def crossing(
    operand: Dims, outputs: Sequence[Dims], looked: Collection[int], terms: Sequence[bool]
) -> Strategy:
    """The rows of an op that looks along dims of operand 0, also where they are cut.

    Args:
        operand: letters of the operand.
        outputs: letters of the outputs.
        looked: the dims along which it looks.
        terms: per output, whether it is a sum of terms where a dim that it lacks is cut; else every
            rank knows it.
    """
    base = Signature((operand,), tuple(outputs), fixed=frozenset(operand[d] for d in looked))
    pairs = list(zip(outputs, terms, strict=True))
    rows = [
        Row(
            (Shard(d),),
            tuple(_output(operand[d], o, t) for o, t in pairs),
            located=True,
        )
        for d in looked
    ]
    strategy = base.strategy()
    return Strategy((*strategy.rows, *rows), extents=strategy.extents, letters=strategy.letters)


def _output(letter: Any, dims: Dims, term: bool) -> Placement:
    if letter in dims:
        return Shard(dims.index(letter))
    return Partial() if term else Replicate()


def cutting(layout: Layout, dims: Collection[int]) -> tuple[int, ...]:
    """The active axes that cut one of these dims."""
    return tuple(
        axis
        for axis in axes_in(layout.active)
        if any(layout.placements[axis].is_shard(d) for d in dims)
    )


def starts(run: Run) -> tuple[int, ...]:
    """Where this rank's piece of operand 0 begins, per dim.

    Only dims that a rule says are located are one interval; others may be interleaved blocks.
    """
    # Rows with a cut of several dims as one are never chosen, so every group is one dim.
    groups = held_groups(run.input_layout(0), tuple(run.call.operands[0].shape))
    return tuple(group.runs[0][0][0] for group in groups)


def stacked(x: Tensor, layout: Layout, axes: tuple[int, ...]) -> Tensor:
    """The tensors of all coordinates of these axes along a new first dim. Differentiable.

    In mesh order, which is that of the pieces of a dim.
    """
    return all_gather(x.unsqueeze(0), group_of(layout.mesh, axes))


def summed(x: Tensor, layout: Layout, axes: tuple[int, ...]) -> Tensor:
    """The sum over these axes, on every rank. Differentiable."""
    return all_reduce(x, group_of(layout.mesh, axes))


def is_first(layout: Layout, axes: tuple[int, ...]) -> bool:
    """Whether this rank is at coordinate 0 of all these axes."""
    return all(layout.coordinate[axis] == 0 for axis in axes)


def place(layout: Layout, axes: tuple[int, ...]) -> int:
    """This rank's row in what `stacked` gives."""
    index = 0
    for axis in axes:
        index = index * layout.sizes[axis] + layout.coordinate[axis]
    return index


def as_term(x: Tensor, layout: Layout, axes: tuple[int, ...]) -> Tensor:
    """What every rank knows, as a sum of terms: zeros everywhere but at coordinate 0."""
    if is_first(layout, axes):
        return x
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)


class _Carried(torch.autograd.Function):
    """The numbers of one tensor, and the gradient of another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, follows: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return None, cotangent


@one_step
def carried(value: Tensor, follows: Tensor) -> Tensor:
    """`value`, with the gradient of `follows`, which has the same shape and is about the same."""
    result: Tensor = _Carried.apply(value, follows)  # type: ignore[no-untyped-call]
    return result


def with_something(x: Tensor, dims: Collection[int], inert: Any) -> Tensor:
    """`x` with one slice of `inert` along these dims, where it holds nothing of them."""
    for dim in dims:
        if x.shape[dim] == 0:
            x = torch.constant_pad_nd(x, [0, 0] * (x.ndim - 1 - dim) + [0, 1], inert)
    return x


def lowest(dtype: torch.dtype) -> Any:
    """What no maximum takes where there is anything else."""
    if dtype is torch.bool:
        return False
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Any:
    """What no minimum takes where there is anything else."""
    if dtype is torch.bool:
        return True
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max
