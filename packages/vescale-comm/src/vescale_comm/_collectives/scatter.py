"""Scatter from one member, with the gather to one member that is its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vescale_comm._checks.arguments import (
    Shape,
    check_dim,
    check_member,
    check_tensor,
)
from vescale_comm._checks.chunk_sizes import chunk_sizes
from vescale_comm._engine.autograd import Linear
from vescale_comm._engine.handles import ready, run_or_start
from vescale_comm._engine.operators import call, name_of, register
from vescale_comm._engine.primitives import PointToPoint, Steps
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.buffers import copy, depending_on, flattened, nbytes


@dataclass(frozen=True, slots=True)
class LinearScatter(Linear):
    """Member i gets its part along `dim` of the tensor of member `source`."""

    group: Group
    source: int
    dim: int
    sizes: tuple[int, ...]
    shape: Shape

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Send each member its shard, from the source."""
        me = self.group.rank
        own = (*self.shape[: self.dim], self.sizes[me], *self.shape[self.dim + 1 :])
        out = x.new_empty(prod(own))
        # Elsewhere `x` only says dtype and shape; its values are not read.
        pieces = torch.split(x, list(self.sizes), self.dim) if me == self.source else ()
        sends = [(flattened(piece), member) for member, piece in enumerate(pieces)]
        away = sum(nbytes(piece) for piece, member in sends if member != me)
        # The source receives its own part, too: `PointToPoint` copies what a member sends to
        # itself.
        receives = [(out, self.source)]
        (arrived,) = yield PointToPoint(
            "scatter", self.group, away, x, sends, receives, detail=self._said()
        )
        return arrived.view(own)

    def _said(self) -> tuple[Any, ...]:
        # For `checked`: a difference in these is otherwise seen by no member, or as a hang.
        return self.source, self.dim, self.sizes, self.shape

    def adjoint(self) -> "LinearGather":
        """Return the gather to the source."""
        return LinearGather(self.group, self.source, self.dim, self.sizes, self.shape)


@dataclass(frozen=True, slots=True)
class LinearGather(Linear):
    """Member `target` gets the members' shards along `dim`, the others zeros."""

    group: Group
    target: int
    dim: int
    sizes: tuple[int, ...]
    shape: Shape

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Send each member's shard to the target."""
        me, flat = self.group.rank, flattened(x)
        pieces: list[Tensor] = []
        if me == self.target:
            each = prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])
            # One buffer for each member: what arrives is 1-D memory, which is interleaved below.
            pieces = [x.new_empty(each * size) for size in self.sizes]
        away = nbytes(flat) if me != self.target else 0
        arrived = yield PointToPoint(
            "gather",
            self.group,
            away,
            x,
            [(flat, self.target)],
            [(piece, member) for member, piece in enumerate(pieces)],
        )
        if me != self.target:
            # The zeros stand for values at the target. A tracer must still see this rank send.
            return depending_on(x.new_zeros(self.shape), arrived)
        head, tail = self.shape[: self.dim], self.shape[self.dim + 1 :]
        shaped = [p.view(*head, size, *tail) for p, size in zip(arrived, self.sizes, strict=True)]
        return torch.cat(shaped, self.dim)

    def adjoint(self) -> LinearScatter:
        """Return the scatter from the target."""
        return LinearScatter(self.group, self.target, self.dim, self.sizes, self.shape)


def scatter(
    x: Tensor,
    group: GroupLike = None,
    *,
    source: int = 0,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Tensor:
    """Split the tensor of one member along a dim and give each member its shard.

    Args:
        x: the tensor at the source; elsewhere any tensor of its shape and dtype.
        group: from `group_of`, a torch process group, or None for the default one.
        source: the member that sends, counted within the group.
        dim: dim to split along; negative counts from the end.
        sizes: extent along `dim` of each member's shard, zeros allowed. None for equal shards.
        async_op: whether to return a `Pending` handle at once.

    Returns:
        This member's shard, new and contiguous. Its gradient is a gather to the source.

    Raises:
        CommArgumentError: no such member or dim, sizes that do not sum to the extent.
    """
    if is_compiling():
        how = source, dim, sizes
        return cast(Tensor, call("scatter", x, name_of(group), *how, async_op=async_op))
    return _scatter(x, as_group(group), source, dim, sizes, async_op)


def _scatter(
    x: Tensor,
    group: Group,
    source: int,
    dim: int,
    sizes: Sequence[int] | None,
    async_op: bool = False,
) -> Tensor:
    collective = plan_scatter(x, group, source, dim, sizes)
    if group.size == 1:
        # Copied: with one member, too, the result is never the caller's memory.
        return cast(Tensor, ready("scatter", copy(x), async_op))
    return cast(Tensor, run_or_start("scatter", collective, x, async_op))


register("scatter(Tensor x, str group, int source, int dim, SymInt[]? sizes) -> Tensor", _scatter)


def plan_scatter(
    x: Tensor,
    group: Group,
    source: int = 0,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> LinearScatter:
    """Check the arguments of `scatter`."""
    check_tensor("scatter", x, group)
    check_member("scatter", "source", source, group)
    dim = check_dim("scatter", dim, tuple(x.shape))
    # From the shape of `x`, which every member has, so that all come to the same division.
    cut = chunk_sizes("scatter", x.shape[dim], dim, sizes, group)
    return LinearScatter(group, source, dim, cut, tuple(x.shape))
