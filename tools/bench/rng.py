"""Random numbers of a piece of a tensor, beside torch filling the whole, or as many numbers.

Filling the whole on every rank is what it takes without vescale_rng to have one device's numbers;
a contiguous piece need not cost more than its own draws and the moves of the stream to them and
from them to the end. The portable policy is held against itself filling the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import vescale_rng
from torch import Tensor
from torch.distributed.tensor import Shard
from vescale_rng import (
    Bernoulli,
    Box,
    Cauchy,
    Distribution,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    ShardLayout,
    Uniform,
)

from tools.bench import Ratio
from tools.bench._rng_consistent import SHAPES, Size, costs
from tools.bench._rng_memory import peaks
from tools.bench._timing import microseconds, microseconds_once

DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": Uniform(0.0, 1.0),
    "normal": Normal(0.0, 1.0),
    "bernoulli": Bernoulli(0.9),
}
# The native policy moves torch's stream in its own way for each; the portable one does not.
NATIVE_ONLY: dict[str, Distribution] = {
    "log-normal": LogNormal(),
    "randint": RandInt(0, 100),
    "exponential": Exponential(),
    "geometric": Geometric(0.3),
    "cauchy": Cauchy(),
}
POLICIES = ("native", "portable")
RANKS = 4
GOAL = 1.25  # of the whole, and for one range of memory of as many draws and the moves
Call = Callable[[], object]


def measure(
    extent: int = 2048, rounds: int = 5, *, memory: bool = True, shapes: Sequence[Size] = SHAPES
) -> Iterator[Ratio]:
    """Pieces of a square matrix, moves of the stream, small calls, `consistent`, extra memory."""
    torch.set_num_threads(1)
    for name in POLICIES:
        with vescale_rng.use(name):
            yield from _pieces(name, extent, rounds)
    yield from _policies(extent, rounds)
    yield from _small(rounds)
    yield from _moves(rounds)
    yield from costs(rounds, shapes)
    if memory:
        yield from peaks()


# --- Pieces


@dataclass(frozen=True)
class Piece:
    """What one rank holds: its layout and, where it is one range of memory, what lies before."""

    layout: ShardLayout
    local: Tensor
    before: int | None = None


def _shapes(extent: int) -> dict[str, Piece]:
    """Pieces of the last rank, most of them a quarter of the matrix."""
    rows = extent // RANKS
    begin = extent * extent // 3 + 1
    return {
        "rows": _sharded((extent, extent), [Shard(0)], (RANKS,), before=rows * 3 * extent),
        "columns": _sharded((extent, extent), [Shard(1)], (RANKS,)),
        "4 columns": _sharded((extent, extent), [Shard(1)], (extent // 4,)),
        "nested, uneven": _sharded((extent, extent + 3), [Shard(1), Shard(0), Shard(1)], (2, 1, 2)),
        "ragged": _ranges(extent, begin, begin + extent * extent // RANKS, begin),
        "two far rows": _far_rows(extent),
    }


def _sharded(
    shape: tuple[int, ...],
    placements: list[Shard],
    mesh: tuple[int, ...],
    before: int | None = None,
) -> Piece:
    layout = vescale_rng.layout_of(shape, placements, mesh, tuple(n - 1 for n in mesh))
    assert layout.local_shape is not None
    return Piece(layout, torch.empty(layout.local_shape), before)


def _ranges(extent: int, begin: int, end: int, before: int) -> Piece:
    """Elements [begin, end) in memory order: parts of two rows, and the rows between."""
    first, last = -(-begin // extent), end // extent
    head, tail = first * extent - begin, end - last * extent
    boxes = (
        Box((first - 1, extent - head), (1, head), 0, (extent, 1)),
        Box((first, 0), (last - first, extent), head, (extent, 1)),
        Box((last, 0), (1, tail), head + (last - first) * extent, (extent, 1)),
    )
    held = tuple(box for box in boxes if prod(box.shape))
    return Piece(ShardLayout((extent, extent), held), torch.empty(end - begin), before)


def _far_rows(extent: int) -> Piece:
    boxes = (
        Box((0, 0), (1, extent), 0, (extent, 1)),
        Box((extent - 1, 0), (1, extent), extent, (extent, 1)),
    )
    return Piece(ShardLayout((extent, extent), boxes), torch.empty(2, extent))


def _pieces(policy: str, extent: int, rounds: int) -> Iterator[Ratio]:
    kinds = DISTRIBUTIONS | (NATIVE_ONLY if policy == "native" else {})
    for kind, distribution in kinds.items():
        for shape, piece in _shapes(extent).items():
            calls = {"ours": _fill(distribution, piece.layout, piece.local)}
            calls |= _references(policy, distribution, piece)
            cost = microseconds(calls, rounds=rounds)
            ours = cost.pop("ours")
            for against, reference in cost.items():
                name = f"{policy}: {kind}, {shape}"
                yield Ratio(name, ours, reference, "us", against, GOAL)


def _fill(distribution: Distribution, layout: ShardLayout, local: Tensor) -> Call:
    return partial(vescale_rng.fill_, local, distribution, layout)


def _references(policy: str, distribution: Distribution, piece: Piece) -> dict[str, Call]:
    calls: dict[str, Call]
    shape = piece.layout.global_shape
    whole, own = torch.empty(shape), torch.empty(piece.local.numel())
    if policy == "portable":
        calls = {"the whole": _fill(distribution, vescale_rng.whole(shape), whole)}
        if piece.before is not None:
            calls["as many"] = _fill(distribution, vescale_rng.whole(own.shape), own)
        return calls
    calls = {"the whole": partial(distribution.draw, whole, None)}
    if piece.before is not None:
        each = vescale_rng.streams.draws(distribution, (16 * 64,)) // (16 * 64)
        after = whole.numel() - own.numel() - piece.before
        moves = (each * piece.before, each * after)
        calls["as many, and the moves"] = partial(_draw_and_move, distribution, own, moves)
    return calls


def _draw_and_move(distribution: Distribution, local: Tensor, moves: tuple[int, int]) -> None:
    vescale_rng.streams.advance(moves[0])
    distribution.draw(local, None)
    vescale_rng.streams.advance(moves[1])


# --- One policy against the other, small calls, and moves of the stream


def _policies(extent: int, rounds: int) -> Iterator[Ratio]:
    whole = torch.empty(extent, extent)
    layout = vescale_rng.whole(whole.shape)
    for kind, distribution in DISTRIBUTIONS.items():
        call = _fill(distribution, layout, whole)
        cost = microseconds({name: _under(name, call) for name in POLICIES}, rounds=rounds)
        name = f"portable: {kind}, the whole"
        yield Ratio(name, cost["portable"], cost["native"], "us", "native")


def _under(policy: str, call: Call) -> Call:
    def run() -> None:
        with vescale_rng.use(policy):
            call()

    return run


def _small(rounds: int) -> Iterator[Ratio]:
    layout = vescale_rng.layout_of((32, 8), [Shard(0)], (RANKS,), (RANKS - 1,))
    x, full = torch.ones(8, 8), torch.ones(32, 8)
    ours: dict[str, tuple[Call, Call]] = {
        "normal_": (
            partial(vescale_rng.fill_, x, Normal(), layout),
            partial(full.normal_),
        ),
        "dropout": (
            partial(vescale_rng.dropout, x, 0.5, layout),
            partial(torch.nn.functional.dropout, full, 0.5),
        ),
    }
    for what, (call, plain) in ours.items():
        calls: dict[str, Call] = {name: _under(name, call) for name in POLICIES}
        calls["plain"] = plain
        cost = microseconds(calls, rounds=rounds)
        for name in POLICIES:
            against = "plain torch, 32 x 8"
            yield Ratio(
                f"{name}: {what}, 8 x 8 of 32 x 8", cost[name], cost["plain"], "us", against
            )


def _moves(rounds: int) -> Iterator[Ratio]:
    count = 1 << 20
    drawn = torch.empty(count, dtype=torch.uint8)
    for exponent in range(3, 13):
        words = 10**exponent
        calls: dict[str, Call] = {
            "move": partial(vescale_rng.streams.advance, words),
            "draw": drawn.random_,
        }
        cost = microseconds(calls, rounds=rounds)
        drawing = cost["draw"] * words / count
        yield Ratio(f"move past 10^{exponent} draws", cost["move"], drawing, "us", "drawing them")
    # Whose polynomials are not there yet.
    new = [
        partial(vescale_rng.streams.advance, 10**12 + 10**9 * turn) for turn in range(1, rounds + 1)
    ]
    cost = microseconds_once({"move": new})
    yield Ratio("the same, a new distance", cost["move"], 1e5, "us", "100 ms", 1.0)
