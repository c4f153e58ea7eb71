"""All-gather and reduce-scatter of a tensor that is sharded along a dim, one shard per member.

The two are each other's adjoint: each is the gradient of the other.
"""

from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from vescale_comm._engine import flat_ops
from vescale_comm._engine.autograd import Linear, no_gradient
from vescale_comm._engine.primitives import Steps
from vescale_comm._groups.group import Group
from vescale_comm._torch.buffers import flattened
from vescale_comm._wire.reduction import divided_in, reduction


@dataclass(frozen=True, slots=True)
class LinearAllGather(Linear):
    """Concatenates the members' tensors along `dim`, of which member i holds `sizes[i]`.

    With `mean` the result is divided by the number of members: the adjoint of an average. `order`
    is that of the adjoint.
    """

    group: Group
    dim: int
    sizes: tuple[int, ...]
    mean: bool = False
    order: str = "native"

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Gathers; along an inner dim the shards are then interleaved."""
        leading, trailing = prod(x.shape[: self.dim]), prod(x.shape[self.dim + 1 :])
        numels = flat_ops.scaled(self.sizes, leading * trailing)
        flat = yield from flat_ops.gather(flattened(x), self.group, numels, x)
        if self.mean:
            # In place where it can: this is the receive buffer, which nothing else refers to.
            flat = flat.to(divided_in(flat.dtype)).div_(self.group.size).to(flat.dtype)
        # The members' parts already follow one another in the final order.
        if leading == 1:
            return flat.view(self._shape(x, sum(self.sizes)))
        # Members' data arrives one after the other; along an inner dim they interleave.
        pieces: list[Tensor] = []
        at = 0
        for count, size in _runs(self.sizes):
            numel = count * leading * size * trailing
            run = flat.narrow(0, at, numel).view(count, *self._shape(x, size))
            pieces.extend(run.unbind())
            at += numel
        return torch.cat(pieces, self.dim)

    def _shape(self, x: Tensor, size: int) -> tuple[int, ...]:
        return (*x.shape[: self.dim], size, *x.shape[self.dim + 1 :])

    def adjoint(self) -> "LinearReduceScatter":
        """Return the reduce-scatter to the same shards."""
        op = "avg" if self.mean else "sum"
        return LinearReduceScatter(self.group, self.dim, self.sizes, op, self.order)


@dataclass(frozen=True, slots=True)
class LinearReduceScatter(Linear):
    """Reduces the members' tensors; member i keeps `sizes[i]` along `dim`."""

    group: Group
    dim: int
    sizes: tuple[int, ...]
    op: str
    order: str = "native"

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Reduce and scatter; along an inner dim the shards are separated before."""
        how = reduction(self.op, x.dtype, self.group.backends[x.device.type], self.order)
        leading, trailing = prod(x.shape[: self.dim]), prod(x.shape[self.dim + 1 :])
        numels = flat_ops.scaled(self.sizes, leading * trailing)
        # The wire takes one member's shard after the other; along an inner dim they interleave.
        flat = flattened(x) if leading == 1 else self._separated(x)
        # The shards stay as divided here, not by `near_equal`: their sizes are what the caller
        # asked for.
        piece = yield from flat_ops.reduce_scatter(flat, self.group, numels, how, x)
        own = self.sizes[self.group.rank]
        return piece.view(*x.shape[: self.dim], own, *x.shape[self.dim + 1 :])

    def _separated(self, x: Tensor) -> Tensor:
        """Return the members' shards one after the other, as one row."""
        before, behind = x.shape[: self.dim], x.shape[self.dim + 1 :]
        pieces: list[Tensor] = []
        at = 0
        for count, size in _runs(self.sizes):
            run = x.narrow(self.dim, at, count * size).reshape(*before, count, size, *behind)
            pieces.append(run.movedim(self.dim, 0).reshape(-1))
            at += count * size
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def adjoint(self) -> LinearAllGather:
        """Return the all-gather of the same shards; refuse what is not linear."""
        if self.op not in ("sum", "avg"):
            no_gradient("reduce_scatter", self.op)
        # An average divides once in either direction; the adjoint has to divide, too.
        mean = self.op == "avg"
        return LinearAllGather(self.group, self.dim, self.sizes, mean=mean, order=self.order)


def _runs(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (how many, how much) for neighbours that hold equally much: few, on any group."""
    if set(map(type, sizes)) != {int}:
        return [(1, size) for size in sizes]  # a tracer's symbols: a comparison would be a guard
    return [(len(list(same)), size) for size, same in groupby(sizes)]
