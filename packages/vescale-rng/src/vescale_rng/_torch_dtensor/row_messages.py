"""Exchanges the parts of the batch that data ranks hold in a draw, and their problems.

A rank that cannot draw its part says so in the message that the others wait for, and its words
follow in a second one: so all ranks raise the same error, and none waits for a rank that has gone.
"""

import zlib
from dataclasses import dataclass, replace
from math import prod

from vescale_rng._errors import LayoutError
from vescale_rng._layout.layout import Ints
from vescale_rng._torch_dtensor.data_axes import DataAxes

# Dims that a message has room for.
DIMS = 16


@dataclass(frozen=True)
class RankPart:
    """What one rank draws into.

    Attributes:
        op: the name of the op.
        shape: of this rank's part of the batch.
        order: its dims from slow to fast in memory.
        trouble: why it cannot be drawn here, or nothing.
    """

    op: str
    shape: Ints
    order: Ints
    trouble: str = ""

    def with_trouble(self, trouble: str) -> "RankPart":
        """Return this part with a reason why it cannot be drawn; the first reason stays."""
        return replace(self, trouble=self.trouble or trouble)


@dataclass(frozen=True)
class Message:
    """What a rank tells the others about a draw: integers, always equally many.

    Attributes:
        op: a checksum of the op's name.
        stream: where the rank's generator stands.
        dim: which dim is the batch's.
        trouble: bytes of the words that say why this rank cannot draw; 0 where it can.
        shape: of this rank's part.
        order: its dims from slow to fast in memory.
    """

    op: int
    stream: int
    dim: int
    trouble: int
    shape: Ints
    order: Ints

    @staticmethod
    def of(part: RankPart, dim: int, stream: int) -> list[int]:
        """Return the message of this rank."""
        # A part with more dims has trouble; of its shape goes what there is room for.
        shape, order = part.shape[:DIMS], part.order[:DIMS]
        room = [0] * (DIMS - len(shape))
        # Not `hash`, which differs over processes.
        op = zlib.crc32(part.op.encode())
        head = [op, stream, dim, len(part.trouble.encode()), len(shape)]
        return [*head, *shape, *room, *order, *room]

    @staticmethod
    def read(row: Ints) -> "Message":
        """Return the message of a row."""
        op, stream, dim, trouble, ndim = row[:5]
        shape, order = row[5 : 5 + ndim], row[5 + DIMS : 5 + DIMS + ndim]
        return Message(op, stream, dim, trouble, shape, order)

    def dense_order(self, order: Ints) -> Ints:
        """Return an order without the dims whose place shows in no stride."""
        return tuple(dim for dim in order if self.shape[dim] > 1)


def exchange(axes: DataAxes, part: RankPart, dim: int, stream: int) -> list[Message]:
    """Return what every data rank draws, in the order of rows. A collective.

    Raises:
        LayoutError: on every rank, where one has trouble, or the parts do not make one tensor.
    """
    found = [Message.read(row) for row in axes.gather(Message.of(part, dim, stream))]
    _raise_trouble(axes, found, part)
    _check_parts(found, part, axes.ranks)
    return found


def _raise_trouble(axes: DataAxes, found: list[Message], part: RankPart) -> None:
    """Raise the words of the first rank that cannot draw, on every rank."""
    longest = max(one.trouble for one in found)
    # All ranks have the same messages, so all or none of them come to the second collective.
    if not longest:
        return
    words = part.trouble.encode()
    # Padded to the longest, as all ranks of a gather send equally many.
    told = axes.gather([*words, *(0 for _ in range(longest - len(words)))])
    first = next(row[: one.trouble] for row, one in zip(told, found, strict=True) if one.trouble)
    who = [rank for rank, one in zip(axes.ranks, found, strict=True) if one.trouble]
    raise LayoutError(f"data rank(s) {who} cannot draw: {bytes(first).decode()}")


def _check_parts(found: list[Message], part: RankPart, ranks: tuple[int, ...]) -> None:
    """Refuse parts that do not make one tensor: every rank sees the same ones.

    Raises:
        LayoutError: the op, the dims or the memory orders differ.
    """
    if len({one.op for one in found}) > 1:
        raise LayoutError(
            f"this rank draws {part.op} of shape {part.shape}, and not all data ranks "
            f"({list(ranks)}) draw the same op now: the ranks have run different programs"
        )
    shapes = ", ".join(f"rank {r}: {o.shape}" for r, o in zip(ranks, found, strict=True))
    # The batch's dim itself is compared too: ranks that differ in it mean different tensors.
    rest = {(o.dim, *(n for d, n in enumerate(o.shape) if d != o.dim)) for o in found}
    if len(rest) > 1:
        raise LayoutError(
            f"{part.op}: the parts of the data ranks differ in more than the batch's dim "
            f"{found[0].dim}, so they make no global tensor: {shapes}. Pad to one length, or say "
            "which dim is the batch's (consistent(batch_dim=...))"
        )
    order = max(found, key=lambda one: prod(one.shape)).order
    # An empty part has no elements that could be in another order.
    filled = [one for one in found if prod(one.shape)]
    if any(one.dense_order(one.order) != one.dense_order(order) for one in filled):
        raise LayoutError(
            f"{part.op}: the parts of the data ranks lie in different memory orders ({shapes}); "
            "one device has one. Make them contiguous"
        )
