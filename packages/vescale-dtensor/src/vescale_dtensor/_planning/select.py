"""Chooses, for each mesh axis, the candidate of a strategy that sends the fewest bytes.

Only candidates that some operand's layout suggests are considered, so that no sharding appears
which the user did not ask for. Ties go to the candidate that changes fewer operands, then to the
earlier one. The choice depends on global facts alone, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from vescale_dtensor._layout.derived_placements import on_dim
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Partial, Replicate, Shard, is_flat, is_interval
from vescale_dtensor._planning.strategy import AxisStrategy, Strategy

_REPLICATE = Replicate()

Operands = Sequence[Placement]


@dataclass(frozen=True)
class AxisChoice:
    """A candidate made concrete, and what it costs.

    Attributes:
        candidate: its placements, with the operands' own kinds of sharding.
        bytes: bytes that a rank sends, up to a common factor.
        changes: number of operands whose placement changes.
    """

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
    """The cheapest candidate for one mesh axis; None if none is possible.

    Args:
        candidates: the possibilities.
        actual: the placement of each operand on this axis.
        sizes: bytes of each operand, up to a common factor.
        count: number of coordinates of the axis.
        fixed: index of an operand that is written in place: its placement may not change, and the
            first output must have it too.
        moves: whether that operand may be redistributed after all, as a copy of it is written.
        fits: whether a concrete candidate goes with what other axes chose.
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
            sum([axis_cost(source, target, size, count) for source, target, size in pairs])
            + bound.local_bytes,
            sum([source != target for source, target, _ in pairs]),
        )
        # Strictly less: of equal candidates the earlier stays, on every rank.
        if best is None or (choice.bytes, choice.changes) < (best.bytes, best.changes):
            best = choice
    return best


def _keeps(candidate: AxisStrategy, actual: Operands, fixed: int, moves: bool) -> bool:
    """Whether the result can be written into operand `fixed`, or into a copy if `moves`."""
    return candidate.inputs[fixed] == candidate.outputs[0] and (
        moves or candidate.inputs[fixed] == actual[fixed]
    )


def _concrete(
    candidate: AxisStrategy, actual: Operands, sizes: Sequence[float]
) -> AxisStrategy | None:
    """A candidate with the kind of sharding that operands have; None if no operand suggests it.

    A `Shard` in a candidate stands for any sharding of its dim. The operand with the most bytes
    decides which, as it is the most expensive to change.
    """
    # The replicated candidate needs no operand to suggest it: it is always right.
    if set(map(type, candidate.inputs)) <= {Replicate}:
        return candidate
    if candidate.fixed_placement:
        lies = any(f == t != _REPLICATE for f, t in zip(actual, candidate.inputs, strict=True))
        return candidate if lies or candidate.proactive else None
    shard: Sharded | None = None
    largest = -1.0
    suggested = False
    # A partial operand suggests partial candidates, a sharded one those that shard its dim. An
    # operand that does not fit a candidate is no reason against it, but costs bytes.
    for source, target, size in zip(actual, candidate.inputs, sizes, strict=True):
        if (
            isinstance(target, Shard)
            and isinstance(source, Sharded)
            and source.cut_dims() == (target.dim,)
        ):
            # The local op counts from where the shard begins, so it has to be one interval.
            if candidate.contiguous_only and not is_interval(source):
                continue
            suggested = True
            if size > largest:
                shard, largest = source, size
        elif isinstance(target, Partial):
            suggested = suggested or (isinstance(source, Partial) and source == target)
        elif isinstance(target, Shard) and is_flat(source):
            # Of several dims that are sharded as one, the outermost: few elements change ranks.
            suggested = suggested or cast(Sharded, source).cut_dims()[0] == target.dim
    if not suggested:
        return None
    if shard is None:  # suggested by a partial operand, or by a flat shard: `Shard` is itself
        return candidate
    return AxisStrategy(
        tuple([_with_shard(p, shard) for p in candidate.inputs]),
        tuple([_with_shard(p, shard) for p in candidate.outputs]),
    )


def _with_shard(placement: Placement, shard: Sharded) -> Placement:
    """The sharding `shard` in place of a `Shard`, on that one's dim."""
    return on_dim(shard, placement.dim) if isinstance(placement, Shard) else placement


def candidates_of_flat_shards(
    strategy: Strategy, actual: Sequence[Operands]
) -> tuple[tuple[AxisStrategy, ...], ...]:
    """For each axis, the candidate that keeps operands whose dims are sharded as one.

    Local tensors are flat then: they have fewer dims than the global tensor. So this only works for
    elementwise ops and full reductions, and if all operands with dims have the same letters and
    placements.

    Args:
        strategy: of the op.
        actual: placements of each operand.

    Returns:
        One tuple per axis, of at most one candidate; empty if it does not work.
    """
    letters = strategy.letters
    with_dims = [i for i, dims in enumerate(letters) if dims]
    if not (with_dims and (strategy.elementwise or strategy.full_reduction)):
        return ()
    first = with_dims[0]
    # A dim without a letter may not be sharded at all.
    flat = [one for one in actual[first] if is_flat(one)]
    lettered = all(letters[first][dim] is not None for one in flat for dim in _cut_dims(one))
    same_letters = all(
        letters[i] == letters[first] and actual[i] == actual[first] for i in with_dims
    )
    if not (same_letters and flat and lettered):
        return ()
    return tuple([_candidate_of_flat_shards(p, with_dims, strategy) for p in actual[first]])


def _cut_dims(placement: Placement) -> tuple[int, ...]:
    return placement.cut_dims() if isinstance(placement, Sharded) else ()


def _candidate_of_flat_shards(
    placement: Placement, with_dims: list[int], strategy: Strategy
) -> tuple[AxisStrategy, ...]:
    """The candidate of one axis; empty if the axis does not shard: ordinary candidates serve."""
    if not isinstance(placement, Sharded):
        return ()
    inputs = tuple(
        [placement if i in with_dims else _REPLICATE for i in range(len(strategy.letters))]
    )
    output = Partial(strategy.full_reduction) if strategy.full_reduction is not None else placement
    outputs = (output,) * max([len(one.outputs) for one in strategy.candidates], default=1)
    return (AxisStrategy(inputs, outputs, fixed_placement=True),)


def axis_cost(source: Placement, target: Placement, size: float, count: int) -> float:
    """Bytes that a rank sends to redistribute one tensor on one mesh axis.

    Args:
        source: present placement.
        target: placement that is needed.
        size: bytes of the tensor.
        count: number of coordinates of the axis.
    """
    # From `Replicate`, every rank slices or masks what it has.
    if count == 1 or isinstance(source, Replicate) or source == target:
        return 0.0
    # The costs of ring algorithms: all-gather and reduce-scatter `share`, all-reduce twice that,
    # all-to-all a `count`-th of it.
    share = size * (count - 1) / count
    if isinstance(source, Partial):
        return share if isinstance(target, Sharded) else 2 * share
    if isinstance(target, Sharded):
        return share / count
    # From a shard to a partial sum (the shard, padded with zeros) nothing is sent, but the result
    # is as large as the global tensor, and has to be reduced later on. That is counted here.
    return share if isinstance(target, Replicate) else 2 * share


def relative_sizes(size_ratios: Sequence[int], itemsizes: Sequence[int]) -> list[float]:
    """Bytes of each operand, up to a common factor, which does not change what is cheapest.

    Args:
        size_ratios: see `OpCall.size_ratios`.
        itemsizes: bytes of an element of each operand.
    """
    return [2.0**p * size for p, size in zip(size_ratios, itemsizes, strict=True)]
