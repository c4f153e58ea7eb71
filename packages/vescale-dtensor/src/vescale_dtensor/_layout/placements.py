"""Placements: how a tensor lies along one axis of a mesh.

A placement is a frozen value. Two placements are equal only when they are of the same kind: a
ragged shard that happens to divide like an even one is still another placement, so no cache can
confuse them. torch's own placement objects are accepted wherever a placement is, and converted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar, cast

from torch.distributed.tensor import placement_types as torch_placements

from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._torch.compat import torch_strided_shard

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
"""Intervals in local order. Empty ones only where nothing is held, then just one."""

ReduceOp = Literal["sum", "avg", "max", "min", "prod", "norm2"]
REDUCE_OPS: tuple[ReduceOp, ...] = ("sum", "avg", "max", "min", "prod", "norm2")


@dataclass(frozen=True, slots=True)
class Placement:
    """Base of all placements. Use one of its subclasses."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this splits a dim (`dim`, if given) over the axis."""
        return False

    def is_replicate(self) -> bool:
        """Whether every coordinate of the axis holds the same values."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the values still have to be combined over the axis (by `reduce_op`, if given)."""
        return False


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every coordinate of the axis holds the whole."""

    def is_replicate(self) -> bool:
        """Return True."""
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every coordinate holds a term; the value is their `reduce_op` over the axis.

    `norm2` is the root of the sum of squares: what the pieces of a norm are.
    """

    reduce_op: ReduceOp = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise LayoutError(
                f"Partial({self.reduce_op!r}): no such reduction; "
                f"use one of {', '.join(REDUCE_OPS)}"
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return True if the reduction is `reduce_op`, or no reduction is asked for."""
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"


class Sharded(Placement):
    """Base of the placements that cut: a coordinate holds a part of one dim, or of several.

    `pieces` says which part, counted within what the cuts of earlier mesh axes have left.
    """

    __slots__ = ()

    def cut_dims(self) -> tuple[int, ...]:
        """The dims that are cut; several are cut as one, flattened row-major."""
        raise NotImplementedError

    def pieces(self, extent: int, count: int) -> tuple[Intervals, ...]:
        """Which intervals of `extent` each of `count` coordinates holds, in their local order."""
        return consecutive(self.sizes(extent, count))

    def sizes(self, extent: int, count: int) -> tuple[int, ...]:
        """How much of `extent` each of `count` coordinates holds."""
        return tuple(
            sum(high - low for low, high in intervals) for intervals in self.pieces(extent, count)
        )

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True if the dim is among those that are cut, or no dim is asked for."""
        return dim is None or dim in self.cut_dims()


def consecutive(sizes: Sequence[int]) -> tuple[Intervals, ...]:
    """One interval each, one after the other."""
    ends = list(accumulate(sizes, initial=0))
    return tuple(((low, high),) for low, high in pairwise(ends))


@dataclass(frozen=True, slots=True)
class Shard(Sharded):
    """Dim `dim` is cut as `torch.chunk` cuts it: ceil(n/k) each, later pieces smaller or empty."""

    dim: int

    def cut_dims(self) -> tuple[int, ...]:
        """Return the one dim."""
        return (self.dim,)

    def sizes(self, extent: int, count: int) -> tuple[int, ...]:
        """Extent of each of `count` pieces of a dim of `extent`."""
        piece = -(-extent // count)
        return tuple(max(0, min(piece, extent - i * piece)) for i in range(count))

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class InterleavedShard(Sharded):
    """Dim `dim` is `blocks` equal blocks, each cut as `Shard` would: fused q, k, v, or gate, up.

    A coordinate holds its piece of every block, one after the other. The extent must be a multiple
    of `blocks`.
    """

    dim: int
    blocks: int

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise LayoutError(f"{self}: the number of blocks has to be positive")

    def cut_dims(self) -> tuple[int, ...]:
        """Return the one dim."""
        return (self.dim,)

    def pieces(self, extent: int, count: int) -> tuple[Intervals, ...]:
        """Intervals of a dim of `extent` that each of `count` coordinates holds."""
        if extent % self.blocks:
            raise LayoutError(f"{self}: extent {extent} is not a multiple of {self.blocks} blocks")
        return _in_blocks((extent // self.blocks,) * self.blocks, count)

    def __repr__(self) -> str:
        return f"InterleavedShard({self.dim}, {self.blocks})"


@dataclass(frozen=True, slots=True)
class StridedShard(Sharded):
    """Dim `dim` is cut into `split_factor` chunks first, and each of them is cut over the axis.

    Both cuts are those of `torch.chunk`; a coordinate holds its piece of every chunk, one after the
    other. This is torch's `_StridedShard`: an inner cut on an earlier mesh axis. See `nested`.
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise LayoutError(f"{self}: the split factor has to be positive")

    def cut_dims(self) -> tuple[int, ...]:
        """Return the one dim."""
        return (self.dim,)

    def pieces(self, extent: int, count: int) -> tuple[Intervals, ...]:
        """Intervals of a dim of `extent` that each of `count` coordinates holds."""
        return _in_blocks(Shard(self.dim).sizes(extent, self.split_factor), count)

    def __repr__(self) -> str:
        return f"StridedShard({self.dim}, split_factor={self.split_factor})"


def _in_blocks(blocks: Sequence[int], count: int) -> tuple[Intervals, ...]:
    """Each block cut over `count` coordinates: what each of them holds of all blocks."""
    owned: list[list[Interval]] = [[] for _ in range(count)]
    start = 0
    for block in blocks:
        for intervals, ((low, high),) in zip(
            owned, consecutive(Shard(0).sizes(block, count)), strict=True
        ):
            intervals.append((start + low, start + high))
        start += block
    return tuple(merged(intervals) for intervals in owned)


def merged(intervals: Sequence[Interval]) -> Intervals:
    """The same elements in the same order, in as few intervals as possible, but in one at least."""
    result: list[Interval] = []
    for low, high in intervals:
        if low == high:
            continue
        if result and result[-1][1] == low:
            result[-1] = (result[-1][0], high)
        else:
            result.append((low, high))
    # An empty piece keeps a place, so that it can be cut out like any other.
    return tuple(result) if result else tuple(intervals[:1])


@dataclass(frozen=True, slots=True)
class RaggedShard(Sharded):
    """Dims `dims` are cut in the proportion of `local_units`, one number per coordinate.

    Several dims have to follow one another. Their elements, flattened row-major, are cut as one
    dim; that is also how they lie in the local tensor, which then has one dim in their place.
    The units are stored in lowest terms, so equal cuts are equal placements. What is cut must be a
    multiple of their sum.
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        cut = tuple(int(d) for d in dims)
        if not cut or any(b != a + 1 for a, b in pairwise(cut)) or (cut[0] < 0) != (cut[-1] < 0):
            raise LayoutError(
                f"RaggedShard: dims {cut} are not one dim, or several that follow one another"
            )
        units = tuple(int(u) for u in local_units)
        if not units or min(units) < 0:
            raise LayoutError(f"RaggedShard: local_units must be non-negative, found {units}")
        divisor = math.gcd(*units) or 1
        object.__setattr__(self, "dims", cut)
        object.__setattr__(self, "local_units", tuple(u // divisor for u in units))

    @property
    def dim(self) -> int:
        """The dim that is cut.

        Raises:
            LayoutError: several dims are cut as one.
        """
        if len(self.dims) > 1:
            raise LayoutError(f"{self} cuts several dims as one; there is no single dim")
        return self.dims[0]

    def cut_dims(self) -> tuple[int, ...]:
        """Return `dims`."""
        return self.dims

    def sizes(self, extent: int, count: int) -> tuple[int, ...]:
        """Extent of each of `count` pieces of a dim (or of flattened dims) of `extent`."""
        total = sum(self.local_units)
        if len(self.local_units) != count:
            raise LayoutError(
                f"{self} names {len(self.local_units)} pieces, "
                f"but its mesh axis has {count} coordinates"
            )
        if extent == 0:
            return (0,) * count
        if total == 0 or extent % total:
            raise LayoutError(f"{self}: extent {extent} is not a multiple of its {total} units")
        return tuple(u * (extent // total) for u in self.local_units)

    def __repr__(self) -> str:
        return f"RaggedShard({self.dims}, {self.local_units})"


AnyShard = TypeVar("AnyShard", bound=Sharded)


def is_flat(placement: Placement) -> bool:
    """Whether a placement cuts several dims as one, so that local tensors have fewer dims."""
    return isinstance(placement, RaggedShard) and len(placement.dims) > 1


def is_interval(placement: Placement) -> bool:
    """Whether every coordinate holds one interval of one dim.

    Only then does a local tensor tell by one offset which indices of the dim it holds.
    """
    return isinstance(placement, Shard | RaggedShard) and not is_flat(placement)


def split_of(dim: int, sizes: Sequence[int]) -> Shard | RaggedShard:
    """The placement that cuts `dim` into `sizes`: `Shard` where torch.chunk would, else ragged."""
    even = Shard(dim)
    if even.sizes(sum(sizes), len(sizes)) == tuple(sizes):
        return even
    return RaggedShard((dim,), sizes)


def on_dim(placement: AnyShard, dim: int) -> AnyShard:
    """The same cut, on another dim; of dims that are cut as one, `dim` is the first."""
    result: Any
    if isinstance(placement, RaggedShard):
        dims = range(dim, dim + len(placement.dims))
        result = RaggedShard(tuple(dims), placement.local_units)
    else:
        result = replace(cast(Any, placement), dim=dim)
    return cast(AnyShard, result)


def nested(dim: int, order: Sequence[int], sizes: Sequence[int]) -> dict[int, Sharded]:
    """Placements by mesh axis that cut `dim` over the axes in `order`, the outermost first.

    In mesh order these are plain shards. An axis that cuts inside of a later one is strided by what
    the later ones cut before: as with torch's `_StridedShard`, the result is the nested one where
    the extents divide evenly.

    Args:
        dim: the dim.
        order: mesh axes, by index, the outermost cut first.
        sizes: extent of each mesh axis.
    """
    result: dict[int, Sharded] = {}
    for place, axis in enumerate(order):
        factor = math.prod(sizes[outer] for outer in order[:place] if outer > axis)
        result[axis] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return result


def as_placement(placement: object) -> Placement:
    """Convert torch's placement objects; pass ours through.

    Raises:
        UnsupportedError: a kind that this version has no equal of.
    """
    if isinstance(placement, Placement):
        return placement
    if type(placement) is torch_placements.Shard:
        return Shard(placement.dim)
    if type(placement) is torch_placements.Replicate:
        return Replicate()
    if type(placement) is torch_placements.Partial:
        # torch calls this one differently.
        op = "prod" if placement.reduce_op == "product" else placement.reduce_op
        return Partial(cast(ReduceOp, op))
    if torch_strided_shard is not None and type(placement) is torch_strided_shard:
        strided: Any = placement
        return StridedShard(int(strided.dim), int(strided.split_factor))
    raise UnsupportedError(
        f"placement {placement!r}: expected Shard, Replicate, Partial, InterleavedShard, "
        "RaggedShard or StridedShard of vescale_dtensor, or torch's own Shard, Replicate or Partial"
    )
