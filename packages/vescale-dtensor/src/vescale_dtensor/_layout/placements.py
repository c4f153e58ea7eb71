"""Placements: how a tensor lies along one axis of a mesh.

A placement is a frozen value. Two placements are equal only when they are of the same kind: a
ragged shard that happens to divide like an even one is still another placement, so no cache can
confuse them. `Shard`, `Replicate` and `Partial` equal torch's own, which are accepted wherever a
placement is, and converted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar, cast

from torch.distributed.tensor import placement_types as torch_placements

from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._torch.bounded_cache import BoundedCache
from vescale_dtensor._torch.compat import asked_by_torch_dtensor, torch_strided_shard

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
"""Intervals in local order. Empty ones only where nothing is held, then just one."""

ReduceOp = Literal["sum", "avg", "max", "min", "prod", "norm2"]
REDUCE_OPS: tuple[ReduceOp, ...] = ("sum", "avg", "max", "min", "prod", "norm2")


TORCH_NAMES = {"prod": "product"}
"""torch's names of reductions, where they are not ours."""


# One object for each value: making one goes through torch's C++. There are few.
_made: BoundedCache[tuple[type, tuple[object, ...]], Any] = BoundedCache(1024)


class _Meta(type(torch_placements.Placement)):  # type: ignore[misc]
    """That of torch's classes, but that `isinstance` asks no Python function, as it does there."""

    __instancecheck__ = type.__instancecheck__

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """The one object of this value."""
        if kwargs:
            return super().__call__(*args, **kwargs)
        found = _made.get((cls, args))
        if found is None:
            found = super().__call__(*args)
            _made.store((cls, args), found)
        return found


def _frozen(self: object, name: str, value: object) -> None:
    raise AttributeError(f"{self} is frozen: {name} cannot be set")


def _equal(self: Any, other: object) -> Any:
    """Whether both are of one kind and value. torch's own `==` takes 70 us where they are not."""
    if self is other:
        return True
    if isinstance(other, Placement):
        return type(self) is type(other) and self.__reduce__() == other.__reduce__()
    if not isinstance(other, torch_placements.Placement):
        return NotImplemented
    return super(type(self), self).__eq__(other)


class Placement:
    """Base of all placements. Use one of its subclasses.

    Those that torch has as well are of torch's classes too, and equal to torch's: its functions
    take them as they take their own. Others are refused there (see `_UnknownToTorch`).
    """

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is `Shard` (of `dim`, if given), whose offsets follow from ceil(n/k)."""
        return False

    def is_sharded(self, dim: int | None = None) -> bool:
        """Whether coordinates hold parts of a dim (`dim`, if given), however it is split."""
        return False

    def is_replicate(self) -> bool:
        """Whether every coordinate of the axis holds the same values."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the values still have to be combined over the axis (by `reduce_op`, if given)."""
        return False


class Replicate(Placement, torch_placements.Replicate, metaclass=_Meta):
    """Every coordinate of the axis holds the whole."""

    __slots__ = ()

    def is_replicate(self) -> bool:
        """Return True."""
        return True

    __setattr__ = _frozen
    __eq__ = _equal
    __hash__ = torch_placements.Replicate.__hash__

    def __reduce__(self) -> Any:
        return Replicate, ()

    def __repr__(self) -> str:
        return "Replicate()"

    __str__ = __repr__


class Partial(Placement, torch_placements.Partial, metaclass=_Meta):
    """Every coordinate holds a term; the value is their `reduce_op` over the axis.

    `norm2` is the root of the sum of squares: what the pieces of a norm are.
    """

    # Beside torch's own attribute, which is slow to read, and has another word for a product.
    __slots__ = ("reduce_op",)

    reduce_op: ReduceOp

    def __init__(self, reduce_op: ReduceOp = "sum") -> None:
        """Of one of `REDUCE_OPS`."""
        if reduce_op not in REDUCE_OPS:
            raise LayoutError(
                f"Partial({reduce_op!r}): no such reduction; use one of {', '.join(REDUCE_OPS)}"
            )
        torch_placements.Partial.__init__(self, TORCH_NAMES.get(reduce_op, reduce_op))
        object.__setattr__(self, "reduce_op", reduce_op)

    __setattr__ = _frozen

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return True if the reduction is `reduce_op`, or no reduction is asked for."""
        return reduce_op is None or reduce_op == self.reduce_op

    def __hash__(self) -> int:
        """That of torch's equal placement."""
        if self.reduce_op not in TORCH_NAMES:
            return super().__hash__()
        return hash(torch_placements.Partial(TORCH_NAMES[self.reduce_op]))

    __eq__ = _equal

    def __reduce__(self) -> Any:
        return Partial, (self.reduce_op,)

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    __str__ = __repr__


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

    def is_sharded(self, dim: int | None = None) -> bool:
        """Return True if the dim is among those that are cut, or no dim is asked for."""
        return dim is None or dim in self.cut_dims()


class _UnknownToTorch(Sharded):
    """Base of the placements that torch.distributed.tensor has no equal of.

    Much of it asks `isinstance(placement, Shard)` of what it is given, and takes what is of none
    of its classes for replicated, in silence. `isinstance` also asks for `__class__`: the one place
    at which to say that it is not.
    """

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        if asked_by_torch_dtensor():
            raise UnsupportedError(
                f"torch.distributed.tensor was given {self!r}, a placement that it does not know "
                "and would take for Replicate(). Use the function of the same name in "
                "vescale_dtensor, or redistribute to Shard() or Replicate() first."
            )
        return type(self)


def consecutive(sizes: Sequence[int]) -> tuple[Intervals, ...]:
    """One interval each, one after the other."""
    ends = list(accumulate(sizes, initial=0))
    return tuple(((low, high),) for low, high in pairwise(ends))


class Shard(Sharded, torch_placements.Shard, metaclass=_Meta):
    """Dim `dim` is cut as `torch.chunk` cuts it: ceil(n/k) each, later pieces smaller or empty."""

    # Beside torch's own attribute, which takes four times as long to read.
    __slots__ = ("dim",)

    dim: int

    def __init__(self, dim: int) -> None:
        """Of one dim; a negative one counts from the last."""
        torch_placements.Shard.__init__(self, dim)
        object.__setattr__(self, "dim", dim)

    __setattr__ = _frozen

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True if this is the dim, or no dim is asked for."""
        return dim is None or dim == self.dim

    def cut_dims(self) -> tuple[int, ...]:
        """Return the one dim."""
        return (self.dim,)

    def sizes(self, extent: int, count: int) -> tuple[int, ...]:
        """Extent of each of `count` pieces of a dim of `extent`."""
        piece = -(-extent // count)
        return tuple(max(0, min(piece, extent - i * piece)) for i in range(count))

    __eq__ = _equal
    __hash__ = torch_placements.Shard.__hash__

    def __reduce__(self) -> Any:
        return Shard, (self.dim,)

    def __repr__(self) -> str:
        return f"Shard({self.dim})"

    __str__ = __repr__


@dataclass(frozen=True, slots=True)
class InterleavedShard(_UnknownToTorch):
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
class StridedShard(_UnknownToTorch):
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
class RaggedShard(_UnknownToTorch):
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
        result = Shard(dim) if type(placement) is Shard else replace(cast(Any, placement), dim=dim)
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
