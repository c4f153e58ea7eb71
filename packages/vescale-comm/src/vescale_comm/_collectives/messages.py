"""From member to member: send, receive, permute, and scatter from one."""

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
    check_pair,
    check_tensor,
    whole_numbers,
)
from vescale_comm._checks.chunk_sizes import cut_of
from vescale_comm._engine.autograd import Linear, apply, needs_gradient
from vescale_comm._engine.operators import call, name_of, named, operator
from vescale_comm._engine.pending import Pending, ready, run_or_start
from vescale_comm._engine.primitives import Steps, Transfer
from vescale_comm._engine.runner import Started, complete
from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.buffers import copy, flattened, nbytes, plain, tied

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Permute(Linear):
    """Member a's tensor goes to member b for each pair (a, b); who gets nothing has zeros."""

    group: Group
    pairs: Pairs
    sent: Shape
    received: Shape

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Sends and receives along the pairs."""
        me, flat = self.group.rank, flattened(x)
        out = x.new_zeros(prod(self.received))
        sends = [(flat, to) for source, to in self.pairs if source == me]
        receives = [(out, source) for source, to in self.pairs if to == me]
        away = sum(nbytes(flat) for _, to in sends if to != me)
        arrived = yield Transfer("permute", self.group, away, x, sends, receives, detail=self.pairs)
        (out,) = arrived if receives else (tied(out, arrived),)
        return out.view(self.received)

    def adjoint(self) -> "Permute":
        """Returns the permutation along the pairs turned round."""
        back = tuple((to, source) for source, to in self.pairs)
        return Permute(self.group, back, self.received, self.sent)


@dataclass(frozen=True, slots=True)
class ScatterFrom(Linear):
    """Member i gets its part along `dim` of the tensor of member `source`."""

    group: Group
    source: int
    dim: int
    sizes: tuple[int, ...]
    shape: Shape

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Sends each member its piece, from the source."""
        me = self.group.rank
        own = (*self.shape[: self.dim], self.sizes[me], *self.shape[self.dim + 1 :])
        out = x.new_empty(prod(own))
        pieces = torch.split(x, list(self.sizes), self.dim) if me == self.source else ()
        sends = [(flattened(piece), member) for member, piece in enumerate(pieces)]
        away = sum(nbytes(piece) for piece, member in sends if member != me)
        receives = [(out, self.source)]
        (arrived,) = yield Transfer(
            "scatter", self.group, away, x, sends, receives, detail=self._said()
        )
        return arrived.view(own)

    def _said(self) -> tuple[Any, ...]:
        return self.source, self.dim, self.sizes, self.shape

    def adjoint(self) -> "GatherTo":
        """Returns the gather to the source."""
        return GatherTo(self.group, self.source, self.dim, self.sizes, self.shape)


@dataclass(frozen=True, slots=True)
class GatherTo(Linear):
    """Member `target` gets the members' pieces along `dim`, the others zeros."""

    group: Group
    target: int
    dim: int
    sizes: tuple[int, ...]
    shape: Shape

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Sends each member's piece to the target."""
        me, flat = self.group.rank, flattened(x)
        pieces: list[Tensor] = []
        if me == self.target:
            each = prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])
            pieces = [x.new_empty(each * size) for size in self.sizes]
        away = nbytes(flat) if me != self.target else 0
        arrived = yield Transfer(
            "gather",
            self.group,
            away,
            x,
            [(flat, self.target)],
            [(piece, member) for member, piece in enumerate(pieces)],
        )
        if me != self.target:
            return tied(x.new_zeros(self.shape), arrived)
        head, tail = self.shape[: self.dim], self.shape[self.dim + 1 :]
        shaped = [p.view(*head, size, *tail) for p, size in zip(arrived, self.sizes, strict=True)]
        return torch.cat(shaped, self.dim)

    def adjoint(self) -> ScatterFrom:
        """Returns the scatter from the target."""
        return ScatterFrom(self.group, self.target, self.dim, self.sizes, self.shape)


def permute(
    x: Tensor,
    group: GroupLike = None,
    *,
    pairs: Sequence[tuple[int, int]],
    shape: Sequence[int] | None = None,
    async_op: bool = False,
) -> Tensor:
    """Sends each member's tensor to another member: a shift, a swap, a ring.

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
    collective = plan_permute(x, as_group(group), pairs, shape)
    return cast(Tensor, run_or_start("permute", collective, x, async_op))


@operator("permute(Tensor x, str group, int[] pairs, SymInt[]? shape) -> Tensor")
def _permute_operator(
    x: Tensor, group: str, pairs: Sequence[int], shape: Sequence[int] | None
) -> Tensor:
    listed = list(zip(pairs[::2], pairs[1::2], strict=True))
    return apply(plan_permute(x, named(group), listed, shape), x)


def plan_permute(
    x: Tensor,
    group: Group,
    pairs: Sequence[tuple[int, int]],
    shape: Sequence[int] | None = None,
) -> Permute:
    """Checks the arguments of `permute`."""
    check_tensor("permute", x, group)
    listed = tuple(check_pair(pair) for pair in pairs)
    for side, members in zip(("sends", "receives"), zip(*listed, strict=True), strict=False):
        for member in members:
            check_member("permute", "pairs", member, group)
            if members.count(member) > 1:
                raise CommArgumentError(f"permute: member {member} {side} twice in {list(listed)}")
    received = tuple(x.shape) if shape is None else whole_numbers("permute", "shape", shape)
    return Permute(group, listed, tuple(x.shape), received)


def scatter(
    x: Tensor,
    group: GroupLike = None,
    *,
    source: int = 0,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Tensor:
    """Cuts the tensor of one member along a dim and gives each member its piece.

    Args:
        x: the tensor at the source; elsewhere any tensor of its shape and dtype.
        group: from `group_of`, a torch process group, or None for the default one.
        source: the member that sends, counted within the group.
        dim: dim to cut along; negative counts from the end.
        sizes: extent along `dim` of each member's piece, zeros allowed. None for equal pieces.
        async_op: whether to return a `Pending` handle at once.

    Returns:
        This member's piece, new and contiguous. Its gradient is a gather to the source.

    Raises:
        CommArgumentError: no such member or dim, sizes that do not sum to the extent.
    """
    if is_compiling():
        how = source, dim, sizes
        return cast(Tensor, call("scatter", x, name_of(group), *how, async_op=async_op))
    return _scatter(x, as_group(group), source, dim, sizes, async_op)


@operator("scatter(Tensor x, str group, int source, int dim, SymInt[]? sizes) -> Tensor")
def _scatter_operator(x: Tensor, group: str, *how: Any) -> Tensor:
    return _scatter(x, named(group), *how)


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
        return cast(Tensor, ready("scatter", copy(x), async_op))
    return cast(Tensor, run_or_start("scatter", collective, x, async_op))


def plan_scatter(
    x: Tensor,
    group: Group,
    source: int = 0,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
) -> ScatterFrom:
    """Checks the arguments of `scatter`."""
    check_tensor("scatter", x, group)
    check_member("scatter", "source", source, group)
    dim = check_dim("scatter", dim, tuple(x.shape))
    cut = cut_of("scatter", x.shape[dim], dim, sizes, group)
    return ScatterFrom(group, source, dim, cut, tuple(x.shape))


def send(x: Tensor, group: GroupLike = None, *, target: int, async_op: bool = False) -> Any:
    """Sends a tensor to one member, which calls `recv`.

    Args:
        x: tensor of any strides. It has no gradient on this way: `permute` has.
        group: from `group_of`, a torch process group, or None for the default one.
        target: the member that receives, counted within the group.
        async_op: whether to return a `Pending` handle at once.

    Raises:
        CommArgumentError: no such member, this one itself, or a tensor that requires a gradient.
    """
    group = as_group(group)
    _check_peer("send", "target", x, target, group)
    flat = flattened(plain(x.detach()))
    steps = _send(x, flat, target, group)
    return Pending("send", Started(steps), _nothing) if async_op else complete(steps)


def recv(like: Tensor, group: GroupLike = None, *, source: int, async_op: bool = False) -> Tensor:
    """Returns the tensor that one member sends here with `send`.

    Args:
        like: any tensor of the shape, dtype and device of the one that comes; it is not changed.
        group: from `group_of`, a torch process group, or None for the default one.
        source: the member that sends, counted within the group.
        async_op: whether to return a `Pending` handle at once.

    Raises:
        CommArgumentError: no such member, or this one itself.
    """
    group = as_group(group)
    _check_peer("recv", "source", like.detach(), source, group)
    steps = _recv(like, source, group)
    result = Pending("recv", Started(steps), _same) if async_op else complete(steps)
    return cast(Tensor, result)


def _send(x: Tensor, flat: Tensor, target: int, group: Group) -> Steps[None]:
    yield Transfer("send", group, nbytes(flat), x, [(flat, target)], [])


def _recv(like: Tensor, source: int, group: Group) -> Steps[Tensor]:
    out = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
    (arrived,) = yield Transfer("recv", group, 0, like, [], [(out, source)])
    return arrived.view(like.shape)


def _nothing(result: object) -> None:
    return None


def _same(result: Tensor) -> Tensor:
    return result


def _check_peer(op: str, name: str, x: Tensor, member: int, group: Group) -> None:
    check_tensor(op, x, group)
    check_member(op, name, member, group)
    if member == group.rank:
        raise CommArgumentError(f"{op}: {name}={member} is this member itself")
    if needs_gradient(x):
        raise CommArgumentError(
            f"{op} has no gradient: pass x.detach(), or use permute, which has one"
        )
