"""What an exchange of pieces needs at every call, worked out once, when its step is made.

Two shortcuts keep a call from growing with the number of ranks. Where the pieces of all members
tile a tensor evenly, packing and unpacking are one permuted copy, however many there are. Else only
pieces that are not empty are looked at: a rank often exchanges with a few others of thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from vescale_comm import SplitSizes

from vescale_dtensor._layout.layout import Shape


class Piece(NamedTuple):
    """A box inside a local tensor: where it begins, and its extents."""

    start: Shape
    shape: Shape


class Tiling(NamedTuple):
    """Equal pieces that tile a tensor, in the order of the members.

    Attributes:
        piece: shape of each.
        counts: number of pieces along each dim of the tensor.
        order: the dims with several pieces, from the one that changes slowest over the members.
    """

    piece: Shape
    counts: Shape
    order: tuple[int, ...]

    def packed(self, x: Tensor) -> Tensor:
        """The pieces of a tensor, one after the other, as one dim."""
        pairs = zip(self.counts, self.piece, strict=True)
        tiles = x.reshape([extent for pair in pairs for extent in pair])
        return tiles.permute(self._dims()).reshape(-1)

    def assembled(self, flat: Tensor) -> Tensor:
        """The tensor of which these are the pieces, one after the other."""
        back = [0] * (2 * len(self.piece))
        for at, dim in enumerate(self._dims()):
            back[dim] = at
        tiles = flat.reshape([self._extent(dim) for dim in self._dims()]).permute(back)
        shape = [n * e for n, e in zip(self.counts, self.piece, strict=True)]
        return tiles.reshape(shape).contiguous()  # a transposed view would do for `reshape`

    def _dims(self) -> list[int]:
        """Dims of `tiles`: count of dim d is 2 d, its extent 2 d + 1; members first."""
        still = [dim for dim in range(len(self.piece)) if dim not in self.order]
        members = [2 * dim for dim in (*self.order, *still)]
        return members + [2 * dim + 1 for dim in range(len(self.piece))]

    def _extent(self, dim: int) -> int:
        return self.piece[dim // 2] if dim % 2 else self.counts[dim // 2]


def tiling_of(pieces: Sequence[Piece], shape: Shape) -> Tiling | None:
    """How these pieces tile a tensor of this shape evenly; None if they do not."""
    piece = pieces[0].shape
    if not prod(piece) or any(p.shape != piece for p in pieces):
        return None
    counts = tuple(max(p.start[d] for p in pieces) // e + 1 for d, e in enumerate(piece))
    tiled = tuple(n * e for n, e in zip(counts, piece, strict=True))
    if prod(counts) != len(pieces) or tiled != shape:
        return None

    def first_change(dim: int) -> int:
        return next(i for i, p in enumerate(pieces) if p.start[dim] != pieces[0].start[dim])

    divided = [dim for dim, count in enumerate(counts) if count > 1]
    if any(all(p.start[dim] == pieces[0].start[dim] for p in pieces) for dim in divided):
        return None
    order = tuple(sorted(divided, key=first_change, reverse=True))
    for member, at in zip(pieces, product(*(range(counts[dim]) for dim in order)), strict=True):
        expected = [0] * len(piece)
        for dim, index in zip(order, at, strict=True):
            expected[dim] = index * piece[dim]
        if list(member.start) != expected:
            return None
    return Tiling(piece, counts, order)


# In the order of the members: a tiling, or the pieces that are not empty.
Packing = Tiling | tuple[Piece, ...]


class Exchange(NamedTuple):
    """An all-to-all of boxes.

    Attributes:
        sizes: elements to and from each member.
        send: what is sent.
        receive: where it goes.
    """

    sizes: SplitSizes
    send: Packing
    receive: Packing


def exchange_of(
    send: Sequence[Piece], before: Shape, receive: Sequence[Piece], after: Shape
) -> Exchange:
    """Work out the exchange in which member i gets `send[i]` and sends `receive[i]`.

    Args:
        send: pieces of this rank's tensor as it is.
        before: its shape.
        receive: pieces of this rank's tensor as it will be.
        after: its shape then.
    """
    sizes = SplitSizes([prod(p.shape) for p in send], [prod(p.shape) for p in receive])
    return Exchange(sizes, packing_of(send, before), packing_of(receive, after))


def packing_of(pieces: Sequence[Piece], shape: Shape) -> Packing:
    """How the pieces of all members are packed out of a tensor of this shape, and unpacked."""
    tiling = tiling_of(pieces, shape)
    return tuple(p for p in pieces if prod(p.shape)) if tiling is None else tiling


def pack(x: Tensor, how: Packing) -> Tensor:
    """The pieces of a tensor as one flat buffer; differentiable."""
    if isinstance(how, Tiling):
        return how.packed(x)
    # As columns: torch.cat gives an empty 1-D tensor a gradient without history.
    parts = [taken(x, piece).reshape(-1, 1) for piece in how]
    return torch.cat(parts).view(-1) if parts else x.reshape(-1)[:0]


def taken(x: Tensor, piece: Piece) -> Tensor:
    """The piece of a tensor, as a view."""
    for dim, (start, extent) in enumerate(zip(piece.start, piece.shape, strict=True)):
        # Every narrow is a node of the graph: none where it would change nothing.
        if extent != x.shape[dim]:
            x = x.narrow(dim, start, extent)
    return x


def unpack(flat: Tensor, how: Packing, shape: Shape) -> Tensor:
    """The tensor of `shape` whose pieces lie in a flat buffer; differentiable.

    The result hangs on the buffer also where no piece has an element: backward is a collective in
    which this rank has to take part.
    """
    if isinstance(how, Tiling):
        return how.assembled(flat)
    if not how:
        return flat.reshape(shape)
    parts, offset = [], 0
    for piece in how:
        numel = prod(piece.shape)
        parts.append((piece.start, flat.narrow(0, offset, numel).view(piece.shape)))
        offset += numel
    return _joined(parts, 0)


def _joined(parts: list[tuple[Shape, Tensor]], dim: int) -> Tensor:
    if len(parts) == 1:
        return parts[0][1]
    ordered = groupby(sorted(parts, key=lambda part: part[0][dim]), key=lambda part: part[0][dim])
    slabs = [_joined(list(slab), dim + 1) for _, slab in ordered]
    return torch.cat(slabs, dim) if len(slabs) > 1 else slabs[0]
