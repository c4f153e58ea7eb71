"""Placements: how a tensor is laid out along one axis of a mesh.

A placement is a frozen value. Two placements are equal only if they are of the same kind: a ragged
shard whose sizes happen to be those of an even one is still another placement, so no cache can
confuse them. `Shard`, `Replicate` and `Partial` equal torch's own. Torch's are accepted wherever a
placement is, and converted by `as_placement` (in `derived_placements`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

from torch.distributed.tensor import placement_types as torch_placements

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.integers import integer, integers, make_integers
from vescale_dtensor._layout.intervals import Intervals, chunk, in_blocks, in_each_block
from vescale_dtensor._layout.placement_base import (
    Placement,
    Sharded,
    TorchPlacementMeta,
    UnknownToTorch,
    frozen_setattr,
    placement_equal,
)

ReduceOp = Literal["sum", "avg", "max", "min", "prod", "norm2"]
REDUCE_OPS: tuple[ReduceOp, ...] = ("sum", "avg", "max", "min", "prod", "norm2")


TORCH_NAMES = {"prod": "product"}
"""Reductions that torch names otherwise, by our names."""


class Replicate(Placement, torch_placements.Replicate, metaclass=TorchPlacementMeta):
    """Every coordinate of the axis holds the same local tensor."""

    __slots__ = ()

    def is_replicate(self) -> bool:
        """Return True."""
        return True

    # Stated in each class and not in `Placement`: `placement_equal` calls the `__eq__` that follows
    # the class in its MRO, and a class that defines `__eq__` loses its inherited `__hash__`.
    __setattr__ = frozen_setattr
    __eq__ = placement_equal
    __hash__ = torch_placements.Replicate.__hash__

    def __reduce__(self) -> Any:
        return Replicate, ()

    def __repr__(self) -> str:
        return "Replicate()"

    __str__ = __repr__


class Partial(Placement, torch_placements.Partial, metaclass=TorchPlacementMeta):
    """Every coordinate holds a partial value; the tensor is their reduction by `reduce_op`.

    `norm2` is the root of the sum of squares: it combines the norms of shards.
    """

    # Shadows torch's attribute, which is slow to read and calls a product otherwise.
    __slots__ = ("reduce_op",)

    reduce_op: ReduceOp

    def __init__(self, reduce_op: ReduceOp = "sum") -> None:
        """Make a partial placement of one of `REDUCE_OPS`."""
        if reduce_op not in REDUCE_OPS:
            raise LayoutError(
                f"Partial({reduce_op!r}): no such reduction; use one of {', '.join(REDUCE_OPS)}"
            )
        torch_placements.Partial.__init__(self, TORCH_NAMES.get(reduce_op, reduce_op))
        # The class is frozen, so its slot is filled past its own `__setattr__`.
        object.__setattr__(self, "reduce_op", reduce_op)

    __setattr__ = frozen_setattr

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return True if the reduction is `reduce_op`, or no reduction is asked for."""
        return reduce_op is None or reduce_op == self.reduce_op

    def __hash__(self) -> int:
        """Return the hash of torch's equal placement."""
        if self.reduce_op not in TORCH_NAMES:
            return super().__hash__()
        # torch hashes its attribute, which a product has under another name: equal objects have to
        # hash alike.
        return hash(torch_placements.Partial(TORCH_NAMES[self.reduce_op]))

    __eq__ = placement_equal

    def __reduce__(self) -> Any:
        return Partial, (self.reduce_op,)

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    __str__ = __repr__


class Shard(Sharded, torch_placements.Shard, metaclass=TorchPlacementMeta):
    """Dim `dim` is divided as by `torch.chunk`: ceil(n / k) each, later shards smaller or empty."""

    # Shadows torch's attribute, which takes four times as long to read.
    __slots__ = ("dim",)

    dim: int

    def __init__(self, dim: int) -> None:
        """Shard one dim; a negative one counts from the last."""
        dim = integer("Shard(dim)", dim)
        torch_placements.Shard.__init__(self, dim)
        object.__setattr__(self, "dim", dim)

    __setattr__ = frozen_setattr

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True if this is the dim, or no dim is asked for."""
        return dim is None or dim == self.dim

    def cut_dims(self) -> tuple[int, ...]:
        """Return the one sharded dim."""
        return (self.dim,)

    def sizes(self, extent: int, count: int) -> tuple[int, ...]:
        """Return the extent of each of `count` shards of a dim of `extent`."""
        piece = -(-extent // count)
        if piece == 0:
            return (0,) * count
        # Shards after the last index are empty, and the one before may be short.
        full, rest = divmod(extent, piece)
        found = (piece,) * full + (rest,) * bool(rest)
        return found + (0,) * (count - len(found))

    def distinct_sizes(self, extent: int, count: int) -> set[int]:
        """Return the different numbers among `sizes`: of full shards, of a short one, of none."""
        piece = -(-extent // count)
        if piece == 0:
            return {0}
        full, rest = divmod(extent, piece)
        return {piece, *([rest] if rest else []), *([0] if full + bool(rest) < count else [])}

    def piece(self, extent: int, count: int, index: int) -> Intervals:
        """Return the interval of shard `index`; an empty one is behind the last element."""
        return (chunk(extent, count, index),)

    __eq__ = placement_equal
    __hash__ = torch_placements.Shard.__hash__

    def __reduce__(self) -> Any:
        return Shard, (self.dim,)

    def __repr__(self) -> str:
        return f"Shard({self.dim})"

    __str__ = __repr__


@dataclass(frozen=True, slots=True)
class InterleavedShard(UnknownToTorch):
    """Dim `dim` is several blocks, each divided as by `Shard` (fused q, k, v; gate, up).

    A coordinate owns its part of every block, one after the other. `blocks` is the number of equal
    blocks, or the proportions of blocks that are not equal: `(4, 1, 1)` for four heads of queries
    to one of keys and one of values. Those are stored in lowest terms, and equal ones as their
    number. The extent has to be a multiple of `unit`.

    Raises:
        LayoutError: there is no block, one is not positive, or a number is no integer.
    """

    dim: int
    blocks: int | tuple[int, ...]

    def __post_init__(self) -> None:
        make_integers(self, "dim")
        if isinstance(self.blocks, Iterable):
            given = tuple(integer("InterleavedShard(blocks)", one) for one in self.blocks)
            found = _proportions(given)
            object.__setattr__(self, "blocks", len(found) if set(found) == {1} else found)
        else:
            make_integers(self, "blocks")
        if not self.proportions or min(self.proportions) < 1:
            raise LayoutError(f"{self}: the number of blocks has to be positive")

    @property
    def proportions(self) -> tuple[int, ...]:
        """How large the blocks are, beside each other."""
        return (1,) * self.blocks if isinstance(self.blocks, int) else self.blocks

    @property
    def unit(self) -> int:
        """What an extent has to be a multiple of."""
        return self.blocks if isinstance(self.blocks, int) else sum(self.blocks)

    def cut_dims(self) -> tuple[int, ...]:
        """Return the one sharded dim."""
        return (self.dim,)

    def pieces(self, extent: int, count: int) -> tuple[Intervals, ...]:
        """Return the intervals of a dim of `extent` that each of `count` coordinates owns.

        Raises:
            LayoutError: `extent` is not a multiple of the blocks.
        """
        return in_blocks(self._blocks(extent), count)

    def distinct_sizes(self, extent: int, count: int) -> set[int]:
        """Return the different numbers among `sizes`; `pieces` says what fits."""
        blocks = self._blocks(extent)
        if not isinstance(self.blocks, int):
            return Sharded.distinct_sizes(self, extent, count)
        found = Shard(self.dim).distinct_sizes(blocks[0], count)
        return {self.blocks * size for size in found}

    def piece(self, extent: int, count: int, index: int) -> Intervals:
        """Return the intervals that coordinate `index` owns; `pieces` says what fits."""
        return in_each_block(self._blocks(extent), count, index)

    def _blocks(self, extent: int) -> tuple[int, ...]:
        """Return the extents of the blocks; `pieces` says what does not fit."""
        if extent % self.unit:
            raise LayoutError(f"{self}: extent {extent} is not a multiple of {self.unit} blocks")
        each = extent // self.unit
        return tuple(each * one for one in self.proportions)

    def __repr__(self) -> str:
        return f"InterleavedShard({self.dim}, {self.blocks})"


def _proportions(sizes: tuple[int, ...]) -> tuple[int, ...]:
    divisor = math.gcd(*sizes) or 1
    return tuple(one // divisor for one in sizes)


@dataclass(frozen=True, slots=True)
class StridedShard(UnknownToTorch):
    """Dim `dim` is divided into `split_factor` chunks, and each chunk is divided over the axis.

    Both divisions are those of `torch.chunk`; a coordinate owns its part of every chunk, one after
    the other. This is torch's `_StridedShard`: a dim that a later mesh axis shards before an
    earlier one. See `nested`.

    Raises:
        LayoutError: `split_factor` is not positive, or a number is no integer.
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        make_integers(self, "dim", "split_factor")
        if self.split_factor < 1:
            raise LayoutError(f"{self}: the split factor has to be positive")

    def cut_dims(self) -> tuple[int, ...]:
        """Return the one sharded dim."""
        return (self.dim,)

    def pieces(self, extent: int, count: int) -> tuple[Intervals, ...]:
        """Return the intervals of a dim of `extent` that each of `count` coordinates owns."""
        return in_blocks(Shard(self.dim).sizes(extent, self.split_factor), count)

    def piece(self, extent: int, count: int, index: int) -> Intervals:
        """Return the intervals that coordinate `index` owns."""
        return in_each_block(Shard(self.dim).sizes(extent, self.split_factor), count, index)

    def __repr__(self) -> str:
        return f"StridedShard({self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True, slots=True)
class RaggedShard(UnknownToTorch):
    """Dims `dims` are divided in the proportion of `local_units`, one number per coordinate.

    Several dims have to be consecutive. Their elements, flattened row-major, are sharded as one
    dim, and the local tensor has one dim in their place. The units are stored in lowest terms, so
    equal divisions are equal placements. The extent has to be a multiple of the sum of the units.

    Raises:
        LayoutError: dims that are not consecutive, units that are negative or missing, or numbers
            that are no integers.
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]
    # Computed once, as there may be thousands of units: where each coordinate's end, and the hash.
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        # All negative or none: -1 and 0 differ by one, but are not neighbours.
        cut = tuple(integer("RaggedShard(dims)", d) for d in dims)
        if not cut or any(b != a + 1 for a, b in pairwise(cut)) or (cut[0] < 0) != (cut[-1] < 0):
            raise LayoutError(
                f"RaggedShard: dims {cut} are not one dim, or several that follow one another"
            )
        units = integers("RaggedShard(local_units)", local_units)
        if not units or min(units) < 0:
            raise LayoutError(f"RaggedShard: local_units must be non-negative, found {units}")
        # `gcd` of zeros is 0: an axis that owns nothing of an empty dim.
        divisor = math.gcd(*units) or 1
        lowest = units if divisor == 1 else tuple([u // divisor for u in units])
        # Frozen, and normalized here: fields are set past the dataclass' own `__setattr__`.
        object.__setattr__(self, "dims", cut)
        object.__setattr__(self, "local_units", lowest)
        object.__setattr__(self, "_ends", tuple(accumulate(lowest)))
        object.__setattr__(self, "_hash", hash((cut, lowest)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return RaggedShard, (self.dims, self.local_units)

    @property
    def dim(self) -> int:
        """The one sharded dim.

        Raises:
            LayoutError: several dims are sharded as one.
        """
        if len(self.dims) > 1:
            raise LayoutError(f"{self} cuts several dims as one; there is no single dim")
        return self.dims[0]

    def cut_dims(self) -> tuple[int, ...]:
        """Return `dims`."""
        return self.dims

    def sizes(self, extent: int, count: int) -> tuple[int, ...]:
        """Return the extent of each of `count` shards of a dim (or flattened dims) of `extent`.

        Raises:
            LayoutError: the number of units is not `count`, or their sum does not divide `extent`.
        """
        unit = self._unit(extent, count)
        return self.local_units if unit == 1 else tuple([u * unit for u in self.local_units])

    def distinct_sizes(self, extent: int, count: int) -> set[int]:
        """Return the different numbers among `sizes`; that says what fits."""
        unit = self._unit(extent, count)
        return {u * unit for u in set(self.local_units)}

    def piece(self, extent: int, count: int, index: int) -> Intervals:
        """Return the interval that coordinate `index` owns; `sizes` says what fits."""
        unit = self._unit(extent, count)
        end = self._ends[index]
        return ((unit * (end - self.local_units[index]), unit * end),)

    def _unit(self, extent: int, count: int) -> int:
        """How many indices one unit is; `sizes` says what does not fit."""
        total = self._ends[-1]
        if len(self.local_units) != count:
            raise LayoutError(
                f"{self} names {len(self.local_units)} pieces, "
                f"but its mesh axis has {count} coordinates"
            )
        # Nothing can be divided in any proportion, also by units that are all zero.
        if extent == 0:
            return 0
        if total == 0 or extent % total:
            raise LayoutError(f"{self}: extent {extent} is not a multiple of its {total} units")
        return extent // total

    def __repr__(self) -> str:
        return f"RaggedShard({self.dims}, {self.local_units})"


def is_flat(placement: Placement) -> bool:
    """Whether a placement shards several dims as one, so that local tensors have fewer dims."""
    return isinstance(placement, RaggedShard) and len(placement.dims) > 1


def is_interval(placement: Placement) -> bool:
    """Whether every coordinate owns one interval of one dim.

    Only then does one offset tell which indices of the dim a local tensor holds.
    """
    return isinstance(placement, Shard | RaggedShard) and not is_flat(placement)
