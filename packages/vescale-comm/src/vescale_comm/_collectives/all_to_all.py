"""All-to-all: every member sends one tensor, or one part of a buffer, to every member."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import cast

from torch import Tensor
from torch.compiler import is_compiling

from vescale_comm._checks.arguments import (
    Shape,
    check_own,
    check_shapes,
    check_tensor,
    whole_numbers,
)
from vescale_comm._engine import flat_ops
from vescale_comm._engine.autograd import Linear
from vescale_comm._engine.handles import ready, run_or_start
from vescale_comm._engine.operators import call, flat_shapes, name_of, register, shapes_of
from vescale_comm._engine.primitives import Steps
from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.buffers import copy, flat_concat, flattened, views


@dataclass(frozen=True, slots=True)
class LinearAllToAll(Linear):
    """Sends `send[i]` elements of a flat buffer to member i, receives `receive[i]` from it."""

    group: Group
    send: tuple[int, ...]
    receive: tuple[int, ...]

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Exchange the parts of the flat buffer."""
        return flat_ops.exchange(flattened(x), self.group, self.send, self.receive, x)

    def adjoint(self) -> "LinearAllToAll":
        """Return the exchange the other way."""
        # What arrived from member i goes back to it, so the two lists of sizes change places.
        return LinearAllToAll(self.group, self.receive, self.send)


class SplitSizes:
    """How many elements of a flat buffer go to each member, and how many come from each.

    Checked once, when made, so that a call over thousands of members does not look at each again.

    Attributes:
        send: `send[i]` elements go to member i.
        receive: `receive[i]` elements come from member i.

    Raises:
        CommArgumentError: other than integers, negative ones, or not as many of both.
    """

    __slots__ = ("receive", "send", "sent", "total")

    def __init__(self, send: Sequence[int], receive: Sequence[int]) -> None:
        self.send = whole_numbers("all_to_all_single", "send", send)
        self.receive = whole_numbers("all_to_all_single", "receive", receive)
        if len(self.send) != len(self.receive) or min((*self.send, *self.receive), default=0) < 0:
            raise CommArgumentError(
                f"all_to_all_single: send has {len(self.send)} sizes and receive "
                f"{len(self.receive)}; give one of each for every member, none negative"
            )
        self.sent, self.total = sum(self.send), sum(self.receive)

    def __repr__(self) -> str:
        return f"SplitSizes(send={list(self.send)}, receive={list(self.receive)})"


def all_to_all_single(
    x: Tensor, group: GroupLike = None, *, sizes: SplitSizes, async_op: bool = False
) -> Tensor:
    """Send parts of one flat buffer to the members and return what they sent here, as one buffer.

    The same as `all_to_all`, without a tensor for each member: what it costs this rank to call it
    does not grow with a tensor for each member of a large group.

    Args:
        x: a 1-D tensor: what goes to member 0, then what goes to member 1, and so on.
        group: from `group_of`, a torch process group, or None for the default one.
        sizes: how many elements go where; keep it for further calls.
        async_op: whether to return a `Pending` handle at once.

    Returns:
        A 1-D tensor: what came from member 0, then from member 1, and so on. Its gradient goes back
        by one all-to-all.

    Raises:
        CommArgumentError: sizes that do not fit the group, the buffer, or this rank's own part.
    """
    if is_compiling():
        found = call(
            "all_to_all_single", x, name_of(group), sizes.send, sizes.receive, async_op=async_op
        )
        return cast(Tensor, found)
    return _all_to_all_single(x, as_group(group), sizes, async_op)


def _all_to_all_single(
    x: Tensor, group: Group, sizes: SplitSizes, async_op: bool = False
) -> Tensor:
    check_tensor("all_to_all_single", x, group)
    # The part that a rank keeps is the only one of which it knows both sizes; the others have to
    # agree pairwise, which `checked` compares.
    own = sizes.send[group.rank] if len(sizes.send) == group.size else None
    if own is None or x.dim() != 1 or x.shape[0] != sizes.sent or own != sizes.receive[group.rank]:
        raise CommArgumentError(
            f"all_to_all_single over {group.name} ({group.size} members, this is member "
            f"{group.rank}): a tensor of the shape {list(x.shape)} does not fit {sizes!r}; x is "
            "1-D with sum(send) elements, and send and receive agree on what a rank keeps"
        )
    if group.size == 1:
        # Copied: with one member, too, the result is never the caller's memory.
        return cast(Tensor, ready("all_to_all", copy(x), async_op))
    collective = LinearAllToAll(group, sizes.send, sizes.receive)
    return cast(Tensor, run_or_start("all_to_all", collective, x, async_op))


register(
    "all_to_all_single(Tensor x, str group, SymInt[] send, SymInt[] receive) -> Tensor",
    lambda x, group, send, receive: _all_to_all_single(x, group, SplitSizes(send, receive)),
)


def all_to_all(
    pieces: Sequence[Tensor],
    group: GroupLike = None,
    *,
    shapes: Sequence[Sequence[int]],
    async_op: bool = False,
) -> list[Tensor]:
    """Send `pieces[i]` to member i and return what the members sent here, in one collective.

    Args:
        pieces: one tensor for each member, of any shapes and strides, also 0-dim or empty; all of
            one dtype and on one device.
        group: from `group_of`, a torch process group, or None for the default one.
        shapes: shape of what comes from each member, in the order of the members; the entry of this
            rank is the shape of the tensor that it keeps.
        async_op: whether to return a `Pending` handle at once.

    Returns:
        One contiguous tensor for each member: views of one receive buffer. Their gradients go back
        by one all-to-all.

    Raises:
        CommArgumentError: not one piece and one shape for each member, mixed dtypes or devices, or
            an own tensor of another shape.
    """
    if is_compiling():
        dims, extents = flat_shapes(shapes)
        found = call("all_to_all", pieces, name_of(group), dims, extents, async_op=async_op)
        return cast(list[Tensor], found)
    return _all_to_all(pieces, as_group(group), shapes, async_op)


def _all_to_all(
    pieces: Sequence[Tensor],
    group: Group,
    shapes: Sequence[Sequence[int]],
    async_op: bool = False,
) -> list[Tensor]:
    collective, flat, shapes = plan_all_to_all(pieces, group, shapes)
    result: list[Tensor]
    if group.size == 1:
        # `flat` is already a new buffer, so even a group of one returns no alias of its input.
        result = ready("all_to_all", views(flat, shapes), async_op)
    else:
        # Split outside of the autograd node, so that one all-to-all runs backward for all views.
        cut = partial(views, shapes=shapes)
        result = run_or_start("all_to_all", collective, flat, async_op, cut)
    return result


register(
    "all_to_all(Tensor[] pieces, str group, int[] dims, SymInt[] extents) -> Tensor[]",
    lambda pieces, group, dims, extents: _all_to_all(pieces, group, shapes_of(dims, extents)),
)


def plan_all_to_all(
    pieces: Sequence[Tensor], group: Group, shapes: Sequence[Sequence[int]]
) -> tuple[LinearAllToAll, Tensor, tuple[Shape, ...]]:
    """Check the arguments; return the collective, its flat input and the shapes of the result."""
    shapes = check_shapes("all_to_all", shapes, group)
    _check_pieces(pieces, group)
    # The only pair of tensor and shape that this rank sees both ends of.
    own = tuple(pieces[group.rank].shape)
    check_own("all_to_all", "shapes", shapes[group.rank], own, group)
    send = tuple(piece.numel() for piece in pieces)
    receive = tuple(prod(shape) for shape in shapes)
    return LinearAllToAll(group, send, receive), flat_concat(pieces), shapes


def _check_pieces(pieces: Sequence[Tensor], group: Group) -> None:
    if len(pieces) != group.size:
        raise CommArgumentError(
            f"all_to_all over {group.name} takes {group.size} pieces, one for each member, not "
            f"{len(pieces)}"
        )
    for piece in pieces:
        # Each of them, and not only the first: a subclass or a sparse one may stand anywhere.
        check_tensor("all_to_all", piece, group)
        if (piece.dtype, piece.device) != (pieces[0].dtype, pieces[0].device):
            raise CommArgumentError(
                f"all_to_all over {group.name}: the pieces are of {pieces[0].dtype} on "
                f"{pieces[0].device} and of {piece.dtype} on {piece.device}; they travel in one "
                "buffer"
            )
