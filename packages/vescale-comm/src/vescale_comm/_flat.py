"""Collectives on flat buffers: contiguous 1-D tensors of which each member has a known part.

Everything above this module arranges elements; everything below moves bytes.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_comm._group import Group
from vescale_comm._issue import issue
from vescale_comm._reduction import Reduction
from vescale_comm._wire import moved

# The same functions under the names that torch gave them later; the old ones warn there.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Sizes = tuple[int, ...]


def gather(flat: Tensor, group: Group, sizes: Sizes, x: Tensor, op: str = "all_gather") -> Tensor:
    """Concatenates the members' buffers, of `sizes` elements each."""
    out = flat.new_empty(sum(sizes))
    sent = (group.size - 1) * flat.nbytes
    if len(set(sizes)) == 1:
        issue(op, group, sent, x, _all_gather_single, moved(out), moved(flat))
        return out
    # gloo gathers into equal pieces only. Sending to every member is the same traffic and pads
    # nothing; an all-to-all would be too, but takes its input repeated for each member.
    pieces = [moved(piece) for piece in torch.split(out, list(sizes))]
    issue(op, group, sent, x, _send_to_all, moved(flat), pieces, ranks=group.ranks, rank=group.rank)
    return out


def _send_to_all(
    mine: Tensor,
    pieces: list[Tensor],
    *,
    ranks: tuple[int, ...],
    rank: int,
    group: dist.ProcessGroup,
) -> None:
    """Fills `pieces` with the members' buffers. Empty ones are not sent: everybody knows sizes."""
    pieces[rank].copy_(mine)
    transfers = []
    for member, peer in enumerate(ranks):
        if member == rank:
            continue
        if mine.numel():
            transfers.append(dist.P2POp(dist.isend, mine, peer, group))
        if pieces[member].numel():
            transfers.append(dist.P2POp(dist.irecv, pieces[member], peer, group))
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()


def exchange(
    flat: Tensor, group: Group, send: Sizes, receive: Sizes, x: Tensor, op: str = "all_to_all"
) -> Tensor:
    """Sends `send[i]` elements to member i and concatenates what the members sent here."""
    out = flat.new_empty(sum(receive))
    sent = flat.nbytes - send[group.rank] * flat.element_size()
    width = 1 if moved(out).dtype == out.dtype else out.element_size()
    issue(
        op,
        group,
        sent,
        x,
        dist.all_to_all_single,
        moved(out),
        moved(flat),
        [width * size for size in receive],
        [width * size for size in send],
    )
    return out


def all_reduce(x: Tensor, group: Group, how: Reduction) -> Tensor:
    """Reduces the members' tensors of equal shape, element by element."""
    own = x.clone(memory_format=torch.contiguous_format)
    if how.plain:
        sent = 2 * own.nbytes * (group.size - 1) // group.size
        issue("all_reduce", group, sent, x, dist.all_reduce, own, op=how.native)
        return how.finish(own, group.size)
    buffer = how.encode(own.view(-1))
    if how.native is None:
        rows = gather(buffer, group, (buffer.numel(),) * group.size, x, "all_reduce")
        return how.finish(how.fold_rows(rows.view(group.size, -1)), group.size).view(x.shape)
    sent = 2 * buffer.nbytes * (group.size - 1) // group.size
    issue("all_reduce", group, sent, x, dist.all_reduce, buffer, op=how.native)
    return how.finish(buffer, group.size).view(x.shape)


def reduce_scatter(flat: Tensor, group: Group, sizes: Sizes, how: Reduction, x: Tensor) -> Tensor:
    """Reduces the members' buffers and returns this member's part, of `sizes[rank]` elements."""
    buffer = how.encode(flat)
    sizes = tuple(how.width * size for size in sizes)
    own = sizes[group.rank]
    if how.native is None:
        rows = exchange(buffer, group, sizes, (own,) * group.size, x, "reduce_scatter")
        return how.finish(how.fold_rows(rows.view(group.size, -1)), group.size)
    out = buffer.new_empty(own)
    sent = buffer.nbytes - out.nbytes
    if len(set(sizes)) == 1:
        issue("reduce_scatter", group, sent, x, _reduce_scatter_single, out, buffer, op=how.native)
    else:
        pieces = list(torch.split(buffer, list(sizes)))
        issue("reduce_scatter", group, sent, x, dist.reduce_scatter, out, pieces, op=how.native)
    return how.finish(out, group.size)
