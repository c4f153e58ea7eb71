"""The gradient reduction of HSDP, where shards are replicated, as one fold over all ranks.

torch reduces in two steps: a reduce-scatter over the ranks that share one copy, which can be
replaced, and an all-reduce over the copies, which can not. So everything happens in the first. Each
rank gets, of the shard that it has in common with its replicas, the part that it alone folds, over
all ranks; the rest of its shard is -0.0. To that torch's own all-reduce adds the replicas' parts:
x + -0.0 is x, for every x and in every order.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_comm._collectives.reduce_scatter import reduce_scatter
from vescale_comm._engine.flat_ops import near_equal
from vescale_comm._groups.group import Group
from vescale_comm._groups.mesh_groups import group_of
from vescale_comm._wire.fold import Order
from vescale_comm._wire.formats import Wire


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaGrid:
    """Ranks in a grid of copies and shards.

    Attributes:
        everyone: all of them, in the order of the mesh: that of the fold.
        shards: the ranks that hold one copy.
        copies: number of copies.
        outer_copies: whether the copies are the outer axis of the mesh.
    """

    everyone: Group
    shards: Group
    copies: int
    outer_copies: bool

    @classmethod
    def of(cls, mesh: DeviceMesh, shard: int, replicate: int) -> "ReplicaGrid":
        """Return the grid of a mesh, by its dims."""
        # A collective where the group is new: every rank of the mesh comes here, in one order of
        # modules.
        everyone = group_of(mesh, (replicate, shard))
        return cls(everyone, group_of(mesh, shard), mesh.size(replicate), replicate < shard)

    def reduce(self, out: Tensor, x: Tensor, order: Order, wire: Wire | None) -> None:
        """Fill `out`, a shard, so that its sum over the copies is the sum of the ranks' `x`.

        Args:
            out: contiguous, 1-D.
            x: contiguous, 1-D: what this rank has to add to each shard.
            order: of the fold over all ranks.
            wire: format in which elements travel.
        """
        rows = x.view(self.shards.size, out.numel())
        # A shard is divided among its replicas, so that each element is folded by exactly one rank.
        sizes = near_equal(out.numel(), self.copies)
        starts = list(accumulate(sizes, initial=0))
        places = [self._place(member) for member in range(self.everyone.size)]
        # One copy: the wire takes one member's part after the other.
        parts = [rows[shard, starts[copy] : starts[copy + 1]] for copy, shard in places]
        found = reduce_scatter(
            torch.cat(parts),
            self.everyone,
            sizes=[sizes[copy] for copy, _ in places],
            order=order,
            wire=wire,
        )
        copy, _ = places[self.everyone.rank]
        # Not 0.0: -0.0 + 0.0 is 0.0, and a sum of -0.0 would lose its sign.
        out.fill_(-0.0)
        out[starts[copy] : starts[copy + 1]] = found

    def _place(self, member: int) -> tuple[int, int]:
        """Return which copy, and which shard of it, a member of `everyone` holds."""
        if self.outer_copies:
            return divmod(member, self.shards.size)
        shard, copy = divmod(member, self.copies)
        return copy, shard
