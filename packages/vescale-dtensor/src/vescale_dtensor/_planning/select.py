"""Chooses, for each mesh axis, the candidate of a strategy that sends the fewest bytes.

Only candidates that some operand's layout already suggests are considered: no sharding appears that
the user did not ask for. Ties go to the candidate that changes fewer operands, then to the earlier
one. The choice depends on global facts alone, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from vescale_dtensor._layout.placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharded,
    is_flat,
    is_interval,
    on_dim,
)
from vescale_dtensor._planning.strategy import AxisStrategy, Strategy

_REPLICATE = Replicate()

Operands = Sequence[Placement]


@dataclass(frozen=True)
class AxisChoice:
    """A bound row, the bytes it moves (in proportion), and the number of operands it changes."""

    candidate: AxisStrategy
    bytes: float
    changes: int


def choose(
    candidates: Sequence[AxisStrategy],
    actual: Operands,
    sizes: Sequence[float],
    count: int,
    fixed: int | None,
    moves: bool = False,
    fits: Callable[[AxisStrategy], bool] | None = None,
) -> AxisChoice | None:
    """The cheapest row along one axis, or None if none keeps what must be kept.

    Args:
        candidates: the possibilities.
        actual: the placement of each operand along this axis.
        sizes: bytes of each operand.
        count: coordinates of the axis.
        fixed: index of an operand whose placement may not change (it is written in place), and
            which the first output must match.
        moves: whether a copy of that operand will do, which may lie otherwise.
        fits: whether a bound row goes with what other axes chose.
    """
    best: AxisChoice | None = None
    for candidate in candidates:
        bound = _concrete(candidate, actual, sizes)
        if bound is None or (fixed is not None and not _keeps(bound, actual, fixed, moves)):
            continue
        if fits is not None and not fits(bound):
            continue
        pairs = list(zip(actual, bound.inputs, sizes, strict=True))
        choice = AxisChoice(
            bound,
            sum(axis_cost(frm, to, size, count) for frm, to, size in pairs),
            sum(frm != to for frm, to, _ in pairs),
        )
        if best is None or (choice.bytes, choice.changes) < (best.bytes, best.changes):
            best = choice
    return best


def _keeps(candidate: AxisStrategy, actual: Operands, fixed: int, moves: bool) -> bool:
    return candidate.inputs[fixed] == candidate.outputs[0] and (
        moves or candidate.inputs[fixed] == actual[fixed]
    )


def _concrete(
    candidate: AxisStrategy, actual: Operands, sizes: Sequence[float]
) -> AxisStrategy | None:
    """The row with its cuts made concrete, or None if no operand suggests it."""
    if all(isinstance(p, Replicate) for p in candidate.inputs):
        return candidate
    if candidate.fixed_placement:
        lies = any(f == t != _REPLICATE for f, t in zip(actual, candidate.inputs, strict=True))
        return candidate if lies or candidate.proactive else None
    shard: Sharded | None = None
    largest = -1.0
    suggested = False
    for frm, to, size in zip(actual, candidate.inputs, sizes, strict=True):
        if isinstance(to, Shard) and isinstance(frm, Sharded) and frm.cut_dims() == (to.dim,):
            if candidate.contiguous_only and not is_interval(frm):
                continue
            suggested = True
            if size > largest:
                shard, largest = frm, size
        elif (isinstance(to, Partial) and frm == to) or _is_outermost(frm, to):
            suggested = True
    if not suggested:
        return None
    if shard is None:
        return candidate
    return AxisStrategy(
        tuple(_with_shard(p, shard) for p in candidate.inputs),
        tuple(_with_shard(p, shard) for p in candidate.outputs),
    )


def _is_outermost(frm: Placement, to: Placement) -> bool:
    """Whether dims are cut as one of which the outermost is to be cut: few elements move."""
    return isinstance(to, Shard) and is_flat(frm) and cast(Sharded, frm).cut_dims()[0] == to.dim


def _with_shard(placement: Placement, shard: Sharded) -> Placement:
    return on_dim(shard, placement.dim) if isinstance(placement, Shard) else placement


def candidates_of_flat_shards(
    strategy: Strategy, actual: Sequence[Operands]
) -> tuple[tuple[AxisStrategy, ...], ...]:
    """For each axis the row that leaves operands as they lie, where dims of theirs are cut as one.

    Local tensors then have fewer dims, so they fit only one another, and tensors without dims; the
    op has to take elements one by one, or all at once, wherever they are.

    Args:
        strategy: of the op.
        actual: placements of each operand.
    """
    letters = strategy.letters
    with_dims = [i for i, dims in enumerate(letters) if dims]
    if not (with_dims and (strategy.elementwise or strategy.full_reduction)):
        return ()
    first = with_dims[0]
    alike = all(letters[i] == letters[first] and actual[i] == actual[first] for i in with_dims)
    if not alike or None in letters[first] or not any(map(is_flat, actual[first])):
        return ()
    return tuple(_candidate_of_flat_shards(p, with_dims, strategy) for p in actual[first])


def _candidate_of_flat_shards(
    placement: Placement, with_dims: list[int], strategy: Strategy
) -> tuple[AxisStrategy, ...]:
    if not isinstance(placement, Sharded):
        return ()
    inputs = tuple(
        placement if i in with_dims else _REPLICATE for i in range(len(strategy.letters))
    )
    output = Partial(strategy.full_reduction) if strategy.full_reduction is not None else placement
    return (AxisStrategy(inputs, (output,), fixed_placement=True),)


def axis_cost(frm: Placement, to: Placement, size: float, count: int) -> float:
    """Bytes a rank sends to change one tensor of `size` bytes along one axis of `count`."""
    if frm == to or count == 1 or isinstance(frm, Replicate):
        return 0.0
    share = size * (count - 1) / count
    if isinstance(frm, Partial):
        return share if isinstance(to, Sharded) else 2 * share
    if isinstance(to, Sharded):
        return share / count
    # Terms made of pieces are sent by nobody, but they are as large as the whole, and have to be
    # summed later on.
    return share if isinstance(to, Replicate) else 2 * share


def relative_sizes(size_ratios: Sequence[int], itemsizes: Sequence[int]) -> list[float]:
    """Bytes of each operand, in proportion: which row is cheapest does not depend on the scale.

    Args:
        size_ratios: see `OpCall.size_ratios`.
        itemsizes: bytes of an element of each operand.
    """
    return [2.0**p * size for p, size in zip(size_ratios, itemsizes, strict=True)]
