"""Derive placements: from torch's own, from sizes, from a shard of another dim, from mesh axes.

`placements` defines the values; the functions here return them and hold no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch.distributed.tensor import placement_types as torch_placements

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import (
    Partial,
    RaggedShard,
    ReduceOp,
    Replicate,
    Shard,
    StridedShard,
)
from vescale_dtensor._torch.compat import torch_strided_shard

AnyShard = TypeVar("AnyShard", bound=Sharded)


def as_placement(placement: object) -> Placement:
    """Convert one of torch's placements; return one of ours as it is.

    Raises:
        UnsupportedError: a kind that this version has no equal of.
    """
    if isinstance(placement, Placement):
        return placement
    # By exact type: a subclass may divide a dim in a way that is unknown here.
    if type(placement) is torch_placements.Shard:
        return Shard(placement.dim)
    if type(placement) is torch_placements.Replicate:
        return Replicate()
    if type(placement) is torch_placements.Partial:
        # torch calls a product otherwise.
        op = "prod" if placement.reduce_op == "product" else placement.reduce_op
        return Partial(cast(ReduceOp, op))
    if torch_strided_shard is not None and type(placement) is torch_strided_shard:
        strided: Any = placement
        return StridedShard(int(strided.dim), int(strided.split_factor))
    raise UnsupportedError(
        f"placement {placement!r}: expected Shard, Replicate, Partial, InterleavedShard, "
        "RaggedShard or StridedShard of vescale_dtensor, or torch's own Shard, Replicate or Partial"
    )


def split_of(dim: int, sizes: Sequence[int]) -> Shard | RaggedShard:
    """Divide `dim` into `sizes`: by `Shard` if torch.chunk gives these, else by a ragged shard."""
    even = Shard(dim)
    if even.sizes(sum(sizes), len(sizes)) == tuple(sizes):
        return even
    return RaggedShard((dim,), sizes)


def on_dim(placement: AnyShard, dim: int) -> AnyShard:
    """Return the same shard of another dim; of dims that are sharded as one, `dim` is the first."""
    result: Any
    if placement.cut_dims()[0] == dim:
        return placement  # nearly always: ops keep most dims where they are
    if isinstance(placement, RaggedShard):
        dims = range(dim, dim + len(placement.dims))
        result = RaggedShard(tuple(dims), placement.local_units)
    else:
        # `Shard` is interned and no dataclass, so `replace` does not apply to it.
        result = Shard(dim) if type(placement) is Shard else replace(cast(Any, placement), dim=dim)
    return cast(AnyShard, result)


def nested(dim: int, order: Sequence[int], sizes: Sequence[int]) -> dict[int, Sharded]:
    """Return placements, by mesh axis, that shard `dim` over the axes in `order`, outermost first.

    In mesh order these are plain shards. An axis that shards inside of a later one is strided by
    the number of parts that later axes have made before: as with torch's `_StridedShard`, the
    result equals the nested one where the extents divide evenly.

    Args:
        dim: the dim.
        order: mesh axes, by index, the one that shards first in front.
        sizes: extent of each mesh axis.
    """
    result: dict[int, Sharded] = {}
    for place, axis in enumerate(order):
        factor = math.prod(sizes[outer] for outer in order[:place] if outer > axis)
        result[axis] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return result
