"""Messages between two members."""

from typing import Any

import torch
from torch import Tensor

from vescale_comm._checks.arguments import (
    check_member,
    check_tensor,
)
from vescale_comm._engine.autograd import needs_gradient
from vescale_comm._engine.fast_path import (
    StartedMessage,
    is_fast_message,
    is_fast_send,
    note_message,
)
from vescale_comm._engine.handles import Pending, identity
from vescale_comm._engine.primitives import PointToPoint, Steps
from vescale_comm._engine.runner import StartedCollective, complete
from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.buffers import flattened, nbytes, plain


def send(x: Tensor, group: GroupLike = None, *, target: int, async_op: bool = False) -> Any:
    """Send a tensor to one member, which calls `recv`.

    Over NCCL the messages of a group go one after another, each until it is received: two members
    that both send first, also with `async_op`, wait for each other once what they send is large.
    Send the two ways by two groups (`group_of(mesh, axes, lane=1)`), or by one `permute`.

    Args:
        x: tensor of any strides. It has no gradient on this way: `permute` has.
        group: from `group_of`, a torch process group, or None for the default one.
        target: the member that receives, counted within the group.
        async_op: whether to return a `Pending` handle at once.

    Raises:
        CommArgumentError: no such member, this one itself, or a tensor that requires a gradient.
    """
    if type(group) is not Group:
        group = as_group(group)
    if async_op and is_fast_send(x, target, group):
        return Pending("send", StartedMessage("send", x, target, group), _nothing)
    _check_peer("send", "target", x, target, group)
    note_message("send", x, target, group)
    # Kept alive by the steps: an asynchronous send reads this memory until it is waited for.
    flat = flattened(plain(x.detach()))
    steps = _send(x, flat, target, group)
    # `x` itself is kept for traces and messages; what travels is `flat`.
    return Pending("send", StartedCollective(steps), _nothing) if async_op else complete(steps)


def recv(like: Tensor, group: GroupLike = None, *, source: int, async_op: bool = False) -> Tensor:
    """Return the tensor that one member sends here with `send`.

    Args:
        like: any tensor of the shape, dtype and device of the one that comes; it is not changed.
        group: from `group_of`, a torch process group, or None for the default one.
        source: the member that sends, counted within the group.
        async_op: whether to return a `Pending` handle at once.

    Raises:
        CommArgumentError: no such member, or this one itself.
    """
    if type(group) is not Group:
        group = as_group(group)
    if async_op and is_fast_message("recv", like, source, group):
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        started: Any = Pending("recv", StartedMessage("recv", out, source, group), identity)
        return started  # type: ignore[no-any-return]
    # Detached: `like` only says shape and dtype, so that it may require a gradient.
    _check_peer("recv", "source", like.detach(), source, group)
    note_message("recv", like, source, group)
    steps = _recv(like, source, group)
    result: Any = (
        Pending("recv", StartedCollective(steps), identity) if async_op else complete(steps)
    )
    found: Tensor = result
    return found


def _send(x: Tensor, flat: Tensor, target: int, group: Group) -> Steps[None]:
    yield PointToPoint("send", group, nbytes(flat), x, [(flat, target)], [])


def _recv(like: Tensor, source: int, group: Group) -> Steps[Tensor]:
    out = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
    (arrived,) = yield PointToPoint("recv", group, 0, like, [], [(out, source)])
    return arrived.view(like.shape)


def _nothing(result: object) -> None:
    return None


def _check_peer(op: str, name: str, x: Tensor, member: int, group: Group) -> None:
    check_tensor(op, x, group)
    check_member(op, name, member, group)
    # A backend cannot send to itself, and a blocking send would wait for its own receive.
    if member == group.rank:
        raise CommArgumentError(f"{op}: {name}={member} is this member itself")
    if needs_gradient(x):
        raise CommArgumentError(
            f"{op} has no gradient: pass x.detach(), or use permute, which has one"
        )
