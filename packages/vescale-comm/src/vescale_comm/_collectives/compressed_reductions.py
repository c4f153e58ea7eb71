"""All-reduce and reduce-scatter whose elements travel in a wire format.

Encode, exchange, decode and fold in fp32; an all-reduce then encodes the result and gathers it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from vescale_comm._engine import flat_ops
from vescale_comm._engine.autograd import Linear
from vescale_comm._engine.primitives import Steps
from vescale_comm._engine.sharded_dim import LinearAllGather
from vescale_comm._groups.group import Group
from vescale_comm._torch.buffers import flattened
from vescale_comm._wire.block_format import QUANTISED, blocks
from vescale_comm._wire.fold import fold
from vescale_comm._wire.formats import (
    Feedback,
    decode,
    encode,
    encoded_bytes,
    has_kernels,
)

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompressedAllReduce(Linear):
    """All-reduce in a wire format; its gradient is reduced in the same format."""

    group: Group
    op: str
    order: str
    wire: str
    feedback: Feedback | None = None

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Exchange encoded parts, fold them, and gather the encoded result."""
        group, wire = self.group, self.wire
        # Each member folds one part in fp32: elements are decoded once and rounded once, and the
        # traffic is that of a reduce-scatter and a gather, whatever the number of members.
        sizes = flat_ops.near_equal(x.numel(), group.size)
        flat = flattened(x).to(torch.float32)
        # Encoded again before it is gathered, so that all decode the same bits, its owner included.
        part = yield from _reduced(flat, sizes, self, x, "all_reduce")
        data = tuple(encoded_bytes(wire, size) for size in sizes)
        everything = yield from flat_ops.gather(encode(part, wire), group, data, x, "all_reduce")
        pieces = [
            decode(piece, wire, size)
            for piece, size in zip(torch.split(everything, list(data)), sizes, strict=True)
        ]
        return torch.cat(pieces).to(x.dtype).view(x.shape)

    def adjoint(self) -> "CompressedAllReduce":
        """Return the same all-reduce, without feedback."""
        # Feedback belongs to one stream of values, and gradients are another.
        return CompressedAllReduce(self.group, self.op, self.order, self.wire)


@dataclass(frozen=True, slots=True)
class CompressedReduceScatter(Linear):
    """Reduce-scatter in a wire format; its gradient is gathered as it is."""

    group: Group
    dim: int
    sizes: Sizes
    op: str
    order: str
    wire: str
    feedback: Feedback | None = None

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Exchange encoded shards and fold them."""
        leading, trailing = prod(x.shape[: self.dim]), prod(x.shape[self.dim + 1 :])
        numels = tuple(leading * size * trailing for size in self.sizes)
        pieces = torch.split(x, list(self.sizes), self.dim)
        flat = torch.cat([piece.reshape(-1) for piece in pieces]).to(torch.float32)
        part = yield from _reduced(flat, numels, self, x, "reduce_scatter")
        own = self.sizes[self.group.rank]
        return part.to(x.dtype).view(*x.shape[: self.dim], own, *x.shape[self.dim + 1 :])

    def adjoint(self) -> LinearAllGather:
        """Return the all-gather of the shards, as they are."""
        mean = self.op == "avg"
        return LinearAllGather(self.group, self.dim, self.sizes, mean=mean, order=self.order)


def _reduced(
    flat: Tensor,
    sizes: Sizes,
    how: CompressedAllReduce | CompressedReduceScatter,
    x: Tensor,
    op: str,
) -> Steps[Tensor]:
    """Return this member's part of the reduction, in fp32."""
    group, wire = how.group, how.wire
    data = tuple(encoded_bytes(wire, size) for size in sizes)
    own = sizes[group.rank]
    if how.feedback is not None and how.feedback.residual is not None:
        # Not in place: `flat` may be the caller's own tensor where that is contiguous fp32.
        flat = flat + how.feedback.residual
    payload = torch.cat([encode(piece, wire) for piece in torch.split(flat, list(sizes))])
    if how.feedback is not None:
        sent = _decoded(torch.split(payload, list(data)), wire, sizes)
        # What the encoding lost, on this rank's own input; the second encoding is not compensated.
        # Of a value that is not finite nothing is kept: it would be in every later sum.
        lost = flat - torch.cat(sent)
        how.feedback.residual = lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    # Every member encodes the same number of elements for this one, so all rows are equally long.
    receive = (data[group.rank],) * group.size
    detail = f"{how.op} of {x.dtype} as {wire} in {how.order} order"
    rows = yield from flat_ops.exchange(payload, group, data, receive, x, op, detail)
    total = _folded(rows.view(group.size, -1), wire, own, how.order)
    return total / group.size if how.op == "avg" else total


def _decoded(pieces: Sequence[Tensor], wire: str, sizes: Sizes) -> list[Tensor]:
    return [decode(piece, wire, size) for piece, size in zip(pieces, sizes, strict=True)]


def _folded(rows: Tensor, wire: str, numel: int, order: str) -> Tensor:
    """Decode the members' rows of bytes and fold them."""
    # The kernel folds first to last, which is "rank" and what "native" is allowed to be.
    if rows.is_cuda and order != "tree" and wire in QUANTISED and has_kernels(wire, rows.device):
        from vescale_comm._wire import kernels

        head = 4 * blocks(numel)
        values = rows[:, head:].contiguous()
        scales = rows[:, :head].contiguous().view(torch.float32)
        dtype = torch.int8 if wire == "int8" else torch.float8_e4m3fn
        return kernels.fold(scales, values.view(dtype))
    members = rows.shape[0]
    return fold(_decoded(rows.unbind(0), wire, (numel,) * members), torch.add, order)
