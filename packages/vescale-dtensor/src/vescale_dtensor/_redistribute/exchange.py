"""Packing of boxes for an exchange, computed once, when its step is made.

Three shortcuts keep the cost of a call from growing with the number of ranks. Where the boxes of
all members tile a tensor evenly, packing and unpacking are one permuted copy, however many there
are. Otherwise only boxes that are not empty are looked at: a rank often exchanges with a few of
thousands. And neighbours of one shape are taken together: of uneven shards, all but the last are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from vescale_comm import SplitSizes

from vescale_dtensor._layout.layout import Shape


class LocalBox(NamedTuple):
    """A box inside a local tensor: its start, and its extents."""

    start: Shape
    shape: Shape


class Tiling(NamedTuple):
    """Equal boxes that tile a tensor, in the order of the members.

    Attributes:
        piece: shape of each box.
        counts: number of boxes along each dim of the tensor.
        order: the dims with several boxes; the first changes slowest from member to member.
    """

    piece: Shape
    counts: Shape
    order: tuple[int, ...]

    def packed(self, x: Tensor) -> Tensor:
        """Return the boxes of a tensor, one after the other, as one dim."""
        pairs = zip(self.counts, self.piece, strict=True)
        # Each dim becomes two: which box, and where inside it.
        tiles = x.reshape([extent for pair in pairs for extent in pair])
        return tiles.permute(self._dims()).reshape(-1)

    def assembled(self, flat: Tensor) -> Tensor:
        """Return the tensor whose boxes are in `flat` one after the other: inverse of `packed`."""
        # The inverse of the permutation in `packed`.
        back = [0] * (2 * len(self.piece))
        for at, dim in enumerate(self._dims()):
            back[dim] = at
        tiles = flat.reshape([self._extent(dim) for dim in self._dims()]).permute(back)
        shape = [n * e for n, e in zip(self.counts, self.piece, strict=True)]
        # `reshape` may return a transposed view, but steps hand on contiguous tensors.
        return tiles.reshape(shape).contiguous()

    def _dims(self) -> list[int]:
        """Return the dims of `tiles` in packed order: members first, then the inside of a box.

        Dim d of the tensor is dim 2 d of `tiles` (which box) and dim 2 d + 1 (where inside it).
        """
        still = [dim for dim in range(len(self.piece)) if dim not in self.order]
        members = [2 * dim for dim in (*self.order, *still)]
        return members + [2 * dim + 1 for dim in range(len(self.piece))]

    def _extent(self, dim: int) -> int:
        """Return the extent of a dim of `tiles`."""
        return self.piece[dim // 2] if dim % 2 else self.counts[dim // 2]


def tiling_of(pieces: Sequence[LocalBox], shape: Shape) -> Tiling | None:
    """Return how these boxes tile a tensor of this shape evenly; None if they do not."""
    piece = pieces[0].shape
    # Empty boxes have no extent to count by.
    if not prod(piece) or any(p.shape != piece for p in pieces):
        return None
    counts = tuple(max(p.start[d] for p in pieces) // e + 1 for d, e in enumerate(piece))
    tiled = tuple(n * e for n, e in zip(counts, piece, strict=True))
    if prod(counts) != len(pieces) or tiled != shape:
        return None

    def first_change(dim: int) -> int:
        return next(i for i, p in enumerate(pieces) if p.start[dim] != pieces[0].start[dim])

    # From here on it is known that the boxes have the right number and extent; what remains is to
    # check that member i's is where the order of the members says.
    divided = [dim for dim, count in enumerate(counts) if count > 1]
    # Several boxes along a dim in which none of them moves: some must coincide.
    if any(all(p.start[dim] == pieces[0].start[dim] for p in pieces) for dim in divided):
        return None
    # The dim that changes first from member to member is the fastest.
    order = tuple(sorted(divided, key=first_change, reverse=True))
    for member, at in zip(pieces, product(*(range(counts[dim]) for dim in order)), strict=True):
        expected = [0] * len(piece)
        for dim, index in zip(order, at, strict=True):
            expected[dim] = index * piece[dim]
        if list(member.start) != expected:
            return None
    return Tiling(piece, counts, order)


class BoxRun(NamedTuple):
    """Boxes of one shape that follow one another along a dim, or that are the same box.

    Attributes:
        first: the first of them.
        number: how many there are.
        dim: along which they follow one another; None if all of them are the first.
    """

    first: LocalBox
    number: int
    dim: int | None

    def start(self, index: int) -> Shape:
        """Return where box `index` starts."""
        if self.dim is None:
            return self.first.start
        at, dim = list(self.first.start), self.dim
        at[dim] += index * self.first.shape[dim]
        return tuple(at)

    def packed(self, x: Tensor) -> list[Tensor]:
        """Return these boxes of a tensor, one after the other, as columns to be joined."""
        start, shape = self.first
        if self.dim is None or self.number == 1:
            return [source_regions(x, self.first).reshape(-1, 1)] * self.number
        dim = self.dim
        joined = source_regions(x, LocalBox(start, self._extents()))
        boxes = joined.reshape(*shape[:dim], self.number, *shape[dim:])
        return [boxes.movedim(dim, 0).reshape(-1, 1)]

    def assembled(self, flat: Tensor) -> Tensor:
        """Return the box that these boxes are together, of their elements: inverse of `packed`."""
        shape = self.first.shape
        if self.dim is None or self.number == 1:
            return flat.view(shape)
        return flat.view(self.number, *shape).movedim(0, self.dim).reshape(self._extents())

    def _extents(self) -> Shape:
        """Return the shape of all boxes together."""
        assert self.dim is not None
        shape = list(self.first.shape)
        shape[self.dim] *= self.number
        return tuple(shape)


def runs_of(pieces: Sequence[LocalBox]) -> tuple[BoxRun, ...]:
    """Return the boxes that are not empty, in their order, in runs as long as can be."""
    found: list[BoxRun] = []
    for piece in pieces:
        if not prod(piece.shape):
            continue
        longer = _continued(found[-1], piece) if found else None
        if longer is None:
            found.append(BoxRun(piece, 1, None))
        else:
            found[-1] = longer
    return tuple(found)


def _continued(run: BoxRun, piece: LocalBox) -> BoxRun | None:
    """Return the run with one more box at its end; None if that box is another one."""
    if piece.shape != run.first.shape:
        return None
    # Two boxes decide along which dim a run goes.
    dims = [run.dim] if run.number > 1 else [None, *range(len(piece.shape))]
    longer = (BoxRun(run.first, run.number + 1, dim) for dim in dims)
    return next((each for each in longer if each.start(run.number) == piece.start), None)


# In the order of the members: a tiling, or runs of the boxes that are not empty.
Packing = Tiling | tuple[BoxRun, ...]


class Exchange(NamedTuple):
    """An all-to-all of boxes.

    Attributes:
        sizes: elements sent to and received from each member.
        send: how the sent boxes are packed.
        receive: how the received ones are unpacked.
    """

    sizes: SplitSizes
    send: Packing
    receive: Packing


def exchange_of(
    send: Sequence[LocalBox], before: Shape, receive: Sequence[LocalBox], after: Shape
) -> Exchange:
    """Prepare the exchange that sends `send[i]` to member i and receives `receive[i]` from it.

    Args:
        send: boxes of this rank's tensor before the exchange.
        before: its shape.
        receive: boxes of this rank's tensor after the exchange.
        after: its shape then.
    """
    sizes = SplitSizes([prod(p.shape) for p in send], [prod(p.shape) for p in receive])
    return Exchange(sizes, packing_of(send, before), packing_of(receive, after))


def packing_of(pieces: Sequence[LocalBox], shape: Shape) -> Packing:
    """Return how the boxes of all members are packed from a tensor of this shape, or unpacked."""
    tiling = tiling_of(pieces, shape)
    return runs_of(pieces) if tiling is None else tiling


def pack(x: Tensor, how: Packing) -> Tensor:
    """Return the boxes of a tensor as one flat buffer; differentiable."""
    if isinstance(how, Tiling):
        return how.packed(x)
    # Joined as columns: for an empty 1-D tensor the backward of torch.cat makes a gradient without
    # history, which would separate a second backward from the collectives that other ranks run.
    parts = [part for run in how for part in run.packed(x)]
    return torch.cat(parts).view(-1) if parts else x.reshape(-1)[:0]


def source_regions(x: Tensor, piece: LocalBox) -> Tensor:
    """Return the box of a tensor, as a view."""
    for dim, (start, extent) in enumerate(zip(piece.start, piece.shape, strict=True)):
        # Every narrow adds a node to the autograd graph, so none where it would change nothing.
        if extent != x.shape[dim]:
            x = x.narrow(dim, start, extent)
    return x


def unpack(flat: Tensor, how: Packing, shape: Shape) -> Tensor:
    """Return the tensor of `shape` whose boxes are in a flat buffer; differentiable.

    The result depends on the buffer in autograd's graph also where no box has an element: backward
    is a collective in which this rank has to take part.
    """
    if isinstance(how, Tiling):
        return how.assembled(flat)
    if not how:
        # Nothing was received, so `shape` is empty; the reshape keeps the link to the buffer.
        return flat.reshape(shape)
    parts, offset = [], 0
    for run in how:
        numel = run.number * prod(run.first.shape)
        parts.append((run.first.start, run.assembled(flat.narrow(0, offset, numel))))
        offset += numel
    # A run may be assembled as a transposed view, but steps hand on contiguous tensors.
    return _joined(parts).contiguous()


def _joined(parts: list[tuple[Shape, Tensor]]) -> Tensor:
    """Concatenate boxes that tile a tensor: slabs along the first dim that divides all of them.

    One placement after the other has divided the tensor, each along one dim, so there is such a
    dim for every part of it. It need not be the first: halves along dim 1 may be divided at
    different rows.
    """
    if len(parts) == 1:
        return parts[0][1]
    for dim in range(parts[0][1].dim()):
        slabs = _slabs(parts, dim)
        if len(slabs) > 1:
            return torch.cat([_joined(slab) for slab in slabs], dim)
    raise AssertionError(f"no dim divides the boxes at {[start for start, _ in parts]}")


def _slabs(parts: list[tuple[Shape, Tensor]], dim: int) -> list[list[tuple[Shape, Tensor]]]:
    """Return the boxes by slab along a dim: those of two slabs have no index of it in common."""
    slabs: list[list[tuple[Shape, Tensor]]] = []
    end = -1
    for part in sorted(parts, key=lambda part: part[0][dim]):
        start = part[0][dim]
        if start < end:
            slabs[-1].append(part)
        else:
            slabs.append([part])
        end = max(end, start + part[1].shape[dim])
    return slabs
