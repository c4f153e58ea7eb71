"""Collectives on flat buffers: contiguous 1-D tensors of which each member has a known part.

Everything above this module arranges elements; everything below moves bytes.
"""

import torch
from torch import Tensor

from vescale_comm._engine.primitives import AllGather, AllToAll, Reduce, ReduceScatter, Steps
from vescale_comm._groups.group import Group
from vescale_comm._torch.buffers import flattened, nbytes
from vescale_comm._wire.reduction import Reduction

Sizes = tuple[int, ...]

SMALL_BYTES = 4096
"""Up to here a folded all-reduce gathers everything in one collective; above it takes two."""


def scaled(sizes: Sizes, factor: int) -> Sizes:
    """Return sizes in another unit, such as elements of rows."""
    # There are as many as ranks, at each call: no call for each of them.
    return sizes if isinstance(factor, int) and factor == 1 else tuple([factor * n for n in sizes])


def gather(
    flat: Tensor,
    group: Group,
    sizes: Sizes,
    x: Tensor,
    op: str = "all_gather",
    detail: object = None,
) -> Steps[Tensor]:
    """Concatenate the members' buffers, of `sizes` elements each."""
    # The receive buffer is the result: nothing is copied after it arrived.
    out = flat.new_empty(sum(sizes))
    sent = (group.size - 1) * nbytes(flat)
    (filled,) = yield AllGather(op, group, sent, x, flat, out, sizes, detail=detail)
    return filled


def exchange(
    flat: Tensor,
    group: Group,
    send: Sizes,
    receive: Sizes,
    x: Tensor,
    op: str = "all_to_all",
    detail: object = None,
) -> Steps[Tensor]:
    """Send `send[i]` elements to member i and concatenate what the members sent here."""
    # Uninitialised: what the members send fills every element, since the sizes agree pairwise.
    out = flat.new_empty(sum(receive))
    sent = nbytes(flat) - send[group.rank] * flat.element_size()
    (filled,) = yield AllToAll(op, group, sent, x, flat, out, send, receive, detail=detail)
    return filled


def all_reduce(x: Tensor, group: Group, how: Reduction, *, owned: bool = False) -> Steps[Tensor]:
    """Reduce the members' tensors of equal shape, element by element; in place if `owned`."""
    if not how.native:
        return (yield from _folded_all_reduce(x, group, how))
    # The backend reduces in place, and the caller's tensor must stay as it is.
    own = x if owned else x.clone(memory_format=torch.contiguous_format)
    buffer = own if how.plain else how.encode(own.view(-1))
    # What a reduce-scatter and an all-gather send, whichever algorithm the backend uses.
    sent = 2 * nbytes(buffer) * (group.size - 1) // group.size
    (total,) = yield Reduce("all_reduce", group, sent, x, buffer, how.backend_op, detail=how)
    return how.finish(total, group.size).view(x.shape)


def _folded_all_reduce(x: Tensor, group: Group, how: Reduction) -> Steps[Tensor]:
    buffer = how.encode(flattened(x))
    if nbytes(buffer) <= SMALL_BYTES:
        sizes = (buffer.numel(),) * group.size
        rows = yield from gather(buffer, group, sizes, x, "all_reduce", how)
        total = how.fold_rows(rows.view(group.size, -1))
    else:
        # Each member folds a part and sends it to the others: the fold of an element does not
        # depend on where it is done.
        sizes = near_equal(buffer.numel(), group.size)
        own = sizes[group.rank]
        receive = (own,) * group.size
        rows = yield from exchange(buffer, group, sizes, receive, x, "all_reduce", how)
        part = how.fold_rows(rows.view(group.size, own))
        total = yield from gather(part, group, sizes, x, "all_reduce")
    return how.decode(total).view(x.shape)


def near_equal(numel: int, members: int) -> Sizes:
    """Split a number of elements into parts that differ by one at most, the larger ones first."""
    each, more = numel // members, numel % members  # divmod refuses a tracer's symbols
    return tuple([each + (1 if member < more else 0) for member in range(members)])


def reduce_scatter(
    flat: Tensor, group: Group, sizes: Sizes, how: Reduction, x: Tensor
) -> Steps[Tensor]:
    """Reduce the members' buffers and return this member's part, of `sizes[rank]` elements."""
    buffer = how.encode(flat)
    # A complex element is two on the wire: sizes count encoded elements from here on.
    sizes = scaled(sizes, how.width)
    own = sizes[group.rank]
    if not how.native:
        receive = (own,) * group.size
        rows = yield from exchange(buffer, group, sizes, receive, x, "reduce_scatter", how)
        return how.decode(how.fold_rows(rows.view(group.size, own)))
    out = buffer.new_empty(own)
    sent = nbytes(buffer) - nbytes(out)
    (part,) = yield ReduceScatter(
        "reduce_scatter", group, sent, x, buffer, out, sizes, how.backend_op, detail=how
    )
    return how.finish(part, group.size)
