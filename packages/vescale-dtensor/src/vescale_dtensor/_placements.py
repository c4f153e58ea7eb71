"""How a tensor lies along one axis of a mesh.

A placement is a frozen value. Two placements are equal only when they are of the same kind: a
ragged split that happens to cut like an even one is still another placement, so no cache can
confuse them. torch's own placement objects are accepted wherever a placement is, and converted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch.distributed.tensor import placement_types as torch_placements

from vescale_dtensor._errors import LayoutError, UnsupportedError

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


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Dim `dim` is cut as `torch.chunk` cuts it: ceil(n/k) each, later pieces smaller or empty."""

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True if the dim is `dim`, or no dim is asked for."""
        return dim is None or dim == self.dim

    def sizes(self, extent: int, count: int) -> tuple[int, ...]:
        """Extent of each of `count` pieces of a dim of `extent`."""
        piece = -(-extent // count)
        return tuple(max(0, min(piece, extent - i * piece)) for i in range(count))

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class RaggedShard(Placement):
    """Dim `dims[0]` is cut in the proportion of `local_units`, one number per coordinate.

    The units are stored in lowest terms, so equal cuts are equal placements. The extent of the dim
    must be a multiple of their sum.
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        if len(dims) != 1:
            raise UnsupportedError(
                f"RaggedShard({tuple(dims)}, …): this version splits one dim; several flattened "
                "dims come later. Flatten them first, then shard the one dim."
            )
        units = tuple(int(u) for u in local_units)
        if not units or min(units) < 0:
            raise LayoutError(f"RaggedShard: local_units must be non-negative, found {units}")
        divisor = math.gcd(*units) or 1
        object.__setattr__(self, "dims", (int(dims[0]),))
        object.__setattr__(self, "local_units", tuple(u // divisor for u in units))

    @property
    def dim(self) -> int:
        """The dim that is cut."""
        return self.dims[0]

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True if the dim is `dim`, or no dim is asked for."""
        return dim is None or dim == self.dim

    def sizes(self, extent: int, count: int) -> tuple[int, ...]:
        """Extent of each of `count` pieces of a dim of `extent`."""
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


Sharded = Shard | RaggedShard


def split_of(dim: int, sizes: Sequence[int]) -> Sharded:
    """The placement that cuts `dim` into `sizes`: `Shard` where torch.chunk would, else ragged."""
    even = Shard(dim)
    if even.sizes(sum(sizes), len(sizes)) == tuple(sizes):
        return even
    return RaggedShard((dim,), sizes)


def moved(placement: Sharded, dim: int) -> Sharded:
    """The same cut, on another dim."""
    if isinstance(placement, RaggedShard):
        return RaggedShard((dim,), placement.local_units)
    return Shard(dim)


def as_placement(placement: object) -> Placement:
    """Convert torch's placement objects; pass ours through.

    Raises:
        UnsupportedError: a kind that this version has no equal of (torch's `_StridedShard`).
    """
    if isinstance(placement, Placement):
        return placement
    if type(placement) is torch_placements.Shard:
        return Shard(placement.dim)
    if type(placement) is torch_placements.Replicate:
        return Replicate()
    if type(placement) is torch_placements.Partial:
        return Partial(cast(ReduceOp, placement.reduce_op))
    raise UnsupportedError(
        f"placement {placement!r}: expected Shard, Replicate, Partial or RaggedShard "
        "of vescale_dtensor, or torch's own Shard, Replicate or Partial"
    )
