"""Permute: each member sends to one member at most, as in a shift, a swap or a ring."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from torch import Tensor
from torch.compiler import is_compiling

from vescale_comm._checks.arguments import (
    Shape,
    check_member,
    check_pair,
    check_tensor,
    whole_numbers,
)
from vescale_comm._engine.autograd import Linear, apply
from vescale_comm._engine.handles import run_or_start
from vescale_comm._engine.operators import call, name_of, register
from vescale_comm._engine.primitives import PointToPoint, Steps
from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.buffers import depending_on, flattened, nbytes

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LinearPermute(Linear):
    """Member a's tensor goes to member b for each pair (a, b); who gets nothing has zeros."""

    group: Group
    pairs: Pairs
    sent: Shape
    received: Shape

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Send and receive along the pairs."""
        me, flat = self.group.rank, flattened(x)
        # Zeros, because a member that receives nothing has a result as well, and a gradient.
        out = x.new_zeros(prod(self.received))
        if self.group.size == 1:
            # Nothing travels: like the other collectives over one member, it is no collective at
            # all for traces, checks and the execution log. What is paired with itself is a copy.
            if self.pairs:
                out.copy_(flat)
            return out.view(self.received)
        sends = [(flat, to) for source, to in self.pairs if source == me]
        receives = [(out, source) for source, to in self.pairs if to == me]
        # A member may be paired with itself: that is a copy, and nothing travels.
        away = sum(nbytes(flat) for _, to in sends if to != me)
        arrived = yield PointToPoint(
            "permute", self.group, away, x, sends, receives, detail=self.pairs
        )
        # A compiler drops a collective without a used result, and this rank may still have to send.
        (out,) = arrived if receives else (depending_on(out, arrived),)
        return out.view(self.received)

    def adjoint(self) -> "LinearPermute":
        """Return the permutation along the pairs turned round."""
        # One to one, as `plan_permute` checked: a transposed permutation is its inverse.
        back = tuple((to, source) for source, to in self.pairs)
        return LinearPermute(self.group, back, self.received, self.sent)


def permute(
    x: Tensor,
    group: GroupLike = None,
    *,
    pairs: Sequence[tuple[int, int]],
    shape: Sequence[int] | None = None,
    async_op: bool = False,
) -> Tensor:
    """Send each member's tensor to another member: a shift, a swap, a ring.

    Args:
        x: this member's tensor, of any shape and strides.
        group: from `group_of`, a torch process group, or None for the default one.
        pairs: (from, to), counted within the group, the same on every member; each member sends at
            most once and receives at most once.
        shape: shape of what arrives here; None for that of `x`.
        async_op: whether to return a `Pending` handle at once.

    Returns:
        What arrives, new and contiguous; zeros where nothing does. Its gradient goes back the same
        ways.

    Raises:
        CommArgumentError: a pair that is not of members, or one that sends or receives twice.
    """
    if is_compiling():
        flat = [member for pair in pairs for member in pair]
        return cast(Tensor, call("permute", x, name_of(group), flat, shape, async_op=async_op))
    # Also for a group of one: pairs, and not the size, say whether the result is a copy or zeros.
    collective = plan_permute(x, as_group(group), pairs, shape)
    return cast(Tensor, run_or_start("permute", collective, x, async_op))


def plan_permute(
    x: Tensor,
    group: Group,
    pairs: Sequence[tuple[int, int]],
    shape: Sequence[int] | None = None,
) -> LinearPermute:
    """Check the arguments of `permute`."""
    check_tensor("permute", x, group)
    listed = tuple(check_pair(pair) for pair in pairs)
    for side, members in zip(("sends", "receives"), zip(*listed, strict=True), strict=False):
        for member in members:
            check_member("permute", "pairs", member, group)
            # Twice to one member has no single result; twice from one would make its gradient a
            # sum.
            if members.count(member) > 1:
                raise CommArgumentError(f"permute: member {member} {side} twice in {list(listed)}")
    received = tuple(x.shape) if shape is None else whole_numbers("permute", "shape", shape)
    own = (group.rank, group.rank) in listed
    if own and prod(received) != x.numel():
        raise CommArgumentError(
            f"permute: what member {group.rank} sends to itself has the shape {tuple(x.shape)}, "
            f"and shape={list(received)} is expected to arrive"
        )
    return LinearPermute(group, listed, tuple(x.shape), received)


def _permute(x: Tensor, group: Group, pairs: Sequence[int], shape: Sequence[int] | None) -> Tensor:
    """As the operator has it: pairs one after the other."""
    listed = list(zip(pairs[::2], pairs[1::2], strict=True))
    return apply(plan_permute(x, group, listed, shape), x)


register("permute(Tensor x, str group, int[] pairs, SymInt[]? shape) -> Tensor", _permute)
