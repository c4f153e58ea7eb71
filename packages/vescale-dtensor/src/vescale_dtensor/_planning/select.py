"""Choose: for each mesh axis the row of a strategy that moves the fewest bytes.

Only possibilities that some operand's layout already suggests are considered, so a layout never
springs up that the user did not ask for. Ties go to the row that changes fewer operands, then to
the earlier row. The choice depends on global facts alone: it is the same on every rank.
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
    moved,
)
from vescale_dtensor._planning.strategy import Row, Strategy

_WHOLE = Replicate()

Operands = Sequence[Placement]


@dataclass(frozen=True)
class Choice:
    """A bound row, the bytes it moves (in proportion), and the number of operands it changes."""

    row: Row
    bytes: float
    changes: int


def choose(
    rows: Sequence[Row],
    actual: Operands,
    sizes: Sequence[float],
    count: int,
    fixed: int | None,
    moves: bool = False,
    fits: Callable[[Row], bool] | None = None,
) -> Choice | None:
    """The cheapest row along one axis, or None if none keeps what must be kept.

    Args:
        rows: the possibilities.
        actual: the placement of each operand along this axis.
        sizes: bytes of each operand.
        count: coordinates of the axis.
        fixed: index of an operand whose placement may not change (it is written in place), and
            which the first output must match.
        moves: whether a copy of that operand will do, which may lie otherwise.
        fits: whether a bound row goes with what other axes chose.
    """
    best: Choice | None = None
    for row in rows:
        bound = _bound(row, actual, sizes)
        if bound is None or (fixed is not None and not _keeps(bound, actual, fixed, moves)):
            continue
        if fits is not None and not fits(bound):
            continue
        pairs = list(zip(actual, bound.inputs, sizes, strict=True))
        choice = Choice(
            bound,
            sum(axis_cost(frm, to, size, count) for frm, to, size in pairs),
            sum(frm != to for frm, to, _ in pairs),
        )
        if best is None or (choice.bytes, choice.changes) < (best.bytes, best.changes):
            best = choice
    return best


def _keeps(row: Row, actual: Operands, fixed: int, moves: bool) -> bool:
    return row.inputs[fixed] == row.outputs[0] and (moves or row.inputs[fixed] == actual[fixed])


def _bound(row: Row, actual: Operands, sizes: Sequence[float]) -> Row | None:
    """The row with its cuts made concrete, or None if no operand suggests it."""
    if all(isinstance(p, Replicate) for p in row.inputs):
        return row
    if row.exact:
        lies = any(f == t != _WHOLE for f, t in zip(actual, row.inputs, strict=True))
        return row if lies or row.offered else None
    cut: Sharded | None = None
    largest = -1.0
    suggested = False
    for frm, to, size in zip(actual, row.inputs, sizes, strict=True):
        if isinstance(to, Shard) and isinstance(frm, Sharded) and frm.cut_dims() == (to.dim,):
            if row.located and not is_interval(frm):
                continue
            suggested = True
            if size > largest:
                cut, largest = frm, size
        elif (isinstance(to, Partial) and frm == to) or _holds_most(frm, to):
            suggested = True
    if not suggested:
        return None
    if cut is None:
        return row
    return Row(tuple(_bind(p, cut) for p in row.inputs), tuple(_bind(p, cut) for p in row.outputs))


def _holds_most(frm: Placement, to: Placement) -> bool:
    """Whether dims are cut as one of which the outermost is to be cut: few elements move."""
    return isinstance(to, Shard) and is_flat(frm) and cast(Sharded, frm).cut_dims()[0] == to.dim


def _bind(placement: Placement, cut: Sharded) -> Placement:
    return moved(cut, placement.dim) if isinstance(placement, Shard) else placement


def rows_of_alike(strategy: Strategy, actual: Sequence[Operands]) -> tuple[tuple[Row, ...], ...]:
    """For each axis the row that leaves operands as they lie, where dims of theirs are cut as one.

    Local tensors then have fewer dims, so they fit only one another, and tensors without dims; the
    op has to take elements one by one, or all at once, wherever they are.

    Args:
        strategy: of the op.
        actual: placements of each operand.
    """
    letters = strategy.letters
    whole = [i for i, dims in enumerate(letters) if dims]
    if not (whole and (strategy.elementwise or strategy.total)):
        return ()
    first = whole[0]
    alike = all(letters[i] == letters[first] and actual[i] == actual[first] for i in whole)
    if not alike or None in letters[first] or not any(map(is_flat, actual[first])):
        return ()
    return tuple(_row_of_alike(p, whole, strategy) for p in actual[first])


def _row_of_alike(placement: Placement, whole: list[int], strategy: Strategy) -> tuple[Row, ...]:
    if not isinstance(placement, Sharded):
        return ()
    inputs = tuple(placement if i in whole else _WHOLE for i in range(len(strategy.letters)))
    output = Partial(strategy.total) if strategy.total is not None else placement
    return (Row(inputs, (output,), exact=True),)


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


def relative_sizes(proportions: Sequence[int], itemsizes: Sequence[int]) -> list[float]:
    """Bytes of each operand, in proportion: which row is cheapest does not depend on the scale.

    Args:
        proportions: see `Call.proportions`.
        itemsizes: bytes of an element of each operand.
    """
    return [2.0**p * size for p, size in zip(proportions, itemsizes, strict=True)]
