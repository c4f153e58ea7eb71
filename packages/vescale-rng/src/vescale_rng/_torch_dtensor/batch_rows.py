"""Where a tensor's rows lie in the global batch: agreed on by the data ranks, draw by draw.

A rank sees its own number of rows and not that of others, and the numbers that it draws depend on
all of them. Which ranks' rows have changed since the last draw, no rank can know by itself: were a
number remembered, a rank whose batch is shorter would ask while the others do not, and all would
wait for ever. So each draw asks, with a message of some 300 bytes, unless the user has said how
many rows there are (`rows`).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch

from vescale_rng._errors import LayoutError, StateError
from vescale_rng._layout.layout import Box, Ints, Layout, dense_strides
from vescale_rng._state.fingerprint import fingerprint
from vescale_rng._torch_dtensor.data_axes import DataAxes
from vescale_rng._torch_dtensor.in_force import batch_dim_inside

# Dims that a message has room for.
_DIMS = 16


@dataclass(frozen=True)
class Part:
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


class BatchRows:
    """The rows of each rank, and the place of a tensor among them.

    Args:
        axes: the ranks that divide the batch.
        dim: the dim that is divided, or a function from the shape of a tensor to that dim.
        rows: rows of each rank, or of every rank; None asks at each draw.
    """

    def __init__(self, axes: DataAxes, dim: Any, rows: int | Sequence[int] | None) -> None:
        self.axes = axes
        self._dim = dim
        self._rows = _each(rows, len(axes.ranks))
        # A rank without rows cannot tell from its part how a shape follows from the batch's.
        self._asks = self._rows is None or 0 in self._rows
        # Set by the first draw, which compares the generators once where nothing is asked.
        self._drawn = False

    def layout(self, part: Part, held: Layout | None, generator: Any) -> Layout:
        """Return the layout of a rank's part in the whole that all data ranks draw.

        Every data rank must call it for the same op.

        Args:
            part: what this rank draws into.
            held: which elements of its data rank's rows this rank holds; None where that is unknown
                because of `part.trouble`.
            generator: the one that is drawn from, to compare.

        Raises:
            LayoutError: on every rank, where the parts do not make one tensor.
            StateError: on every rank, where the generators differ.
        """
        dim = self._dim_of(part)
        if self._asks:
            sizes, order = self._ask(part, dim, generator)
        else:
            # Without a message the own memory order has to do: parts of one row leave it open.
            sizes, order = self._told(part, dim, generator), part.order
        assert held is not None
        return _moved(held, dim, tuple(sizes), self.axes.index, order)

    def close(self) -> None:
        """Compare the generators once more, where draws went by what was told. A collective."""
        if self._drawn and not self._asks:
            self._check_step([row[0] for row in self.axes.gather([fingerprint()])], "at the end")

    def _dim_of(self, part: Part) -> int:
        ndim = len(part.shape)
        dim = batch_dim_inside()
        if dim is None:
            dim = self._dim(part.shape) if callable(self._dim) else self._dim
        if not -ndim <= dim < ndim or ndim > _DIMS:
            raise LayoutError(
                f"{part.op} of shape {part.shape} has no dim {dim}, which is the batch's by "
                f"consistent(batch_dim=...), or more than {_DIMS} dims"
            )
        return int(dim % ndim)

    def _told(self, part: Part, dim: int, generator: Any) -> list[int]:
        assert self._rows is not None
        if part.trouble:
            raise LayoutError(part.trouble)
        if not self._drawn:
            found = self.axes.gather([fingerprint(generator)])
            self._check_step([row[0] for row in found], f"at {part.op}")
            self._drawn = True
        mine, size = self._rows[self.axes.index], part.shape[dim]
        if size % mine:
            raise LayoutError(
                f"{part.op} of shape {part.shape}: dim {dim} has {size} elements, which are no "
                f"multiple of the {mine} rows that consistent(rows={list(self._rows)}) gives this "
                "rank. Leave out `rows`, and the ranks agree on their numbers at each draw"
            )
        return [rows * (size // mine) for rows in self._rows]

    def _ask(self, part: Part, dim: int, generator: Any) -> tuple[list[int], Ints]:
        found = [_Message.read(row) for row in self.axes.gather(_Message.of(part, dim, generator))]
        _check_parts(found, part, self.axes.ranks)
        self._check_step([one.stream for one in found], f"at {part.op}")
        # The memory order of one device shows where most elements are: a part with one row, or
        # none, has several orders at once.
        fullest = max(found, key=lambda one: prod(one.shape))
        return [one.shape[dim] for one in found], fullest.order

    def _check_step(self, streams: list[int], where: str) -> None:
        if len(set(streams)) > 1:
            first = streams[0]
            others = [r for r, s in zip(self.axes.ranks, streams, strict=True) if s != first]
            raise StateError(
                f"{where} the random generators of the data ranks differ: rank(s) {others} from "
                f"rank {self.axes.ranks[0]}. Seed every rank alike (torch.manual_seed(0), no rank "
                "in it) and draw the same ops everywhere; vescale_rng.check_in_step() tells more"
            )


@dataclass(frozen=True)
class _Message:
    """What a rank tells the others about a draw: integers, always equally many."""

    op: int
    stream: int
    dim: int
    trouble: bool
    shape: Ints
    order: Ints

    @staticmethod
    def of(part: Part, dim: int, generator: Any) -> list[int]:
        """Return the message of this rank."""
        room = [0] * (_DIMS - len(part.shape))
        # Not `hash`, which differs over processes.
        op = zlib.crc32(part.op.encode())
        head = [op, fingerprint(generator), dim, bool(part.trouble), len(part.shape)]
        return [*head, *part.shape, *room, *part.order, *room]

    @staticmethod
    def read(row: tuple[int, ...]) -> "_Message":
        """Return the message of a row."""
        op, stream, dim, trouble, ndim = row[:5]
        shape, order = row[5 : 5 + ndim], row[5 + _DIMS : 5 + _DIMS + ndim]
        return _Message(op, stream, dim, bool(trouble), shape, order)

    def dense_order(self, order: Ints) -> Ints:
        """Return an order without the dims whose place shows in no stride."""
        return tuple(dim for dim in order if self.shape[dim] > 1)


def _check_parts(found: list[_Message], part: Part, ranks: tuple[int, ...]) -> None:
    """Refuse parts that do not make one tensor: every rank sees the same ones.

    Raises:
        LayoutError: the op, the dims or the memory orders differ, or a rank cannot draw.
    """
    if any(one.trouble for one in found):
        who = [rank for rank, one in zip(ranks, found, strict=True) if one.trouble]
        raise LayoutError(part.trouble or f"{part.op}: rank(s) {who} cannot draw their part")
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
    # An empty part has no elements that could lie in another order.
    filled = [one for one in found if prod(one.shape)]
    if any(one.dense_order(one.order) != one.dense_order(order) for one in filled):
        raise LayoutError(
            f"{part.op}: the parts of the data ranks lie in different memory orders ({shapes}); "
            "one device has one. Make them contiguous"
        )


@lru_cache(maxsize=1024)  # one object for equal arguments: what is planned on it is kept
def _moved(held: Layout, dim: int, sizes: Ints, index: int, order: Ints) -> Layout:
    """Return the layout of a data rank's rows as a part of all rows."""
    # Rows of the ranks before this one.
    begin = [0, *accumulate(sizes)][index]
    shape = (*held.global_shape[:dim], sum(sizes), *held.global_shape[dim + 1 :])
    boxes = []
    for box in held.boxes:
        place = list(box.global_offset)
        place[dim] += begin
        boxes.append(Box(tuple(place), box.shape, box.local_offset, box.local_strides))
    row_major = tuple(order) == tuple(range(len(shape)))
    return replace(
        held,
        global_shape=shape,
        boxes=tuple(boxes),
        memory_order=None if row_major else tuple(order),
    )


def part_of(op: str, tensor: torch.Tensor) -> tuple[Part, Layout | None]:
    """Return what is told of a plain tensor, and its layout within its rank's rows."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    if tensor.is_contiguous():
        # What torch calls contiguous may have any stride where a dim is 1: it is row-major then.
        order = tuple(range(tensor.ndim))
    dense = dense_strides(shape, order)
    sides = zip(shape, strides, dense, strict=True)
    if 0 not in shape and any(one != other for size, one, other in sides if size > 1):
        trouble = (
            f"{op}: a plain tensor of shape {shape} with strides {strides} has gaps in its memory, "
            "so its place in the batch's cannot be known: draw into a contiguous tensor and copy"
        )
        return Part(op, shape, tuple(range(tensor.ndim)), trouble), None
    boxes = (Box((0,) * tensor.ndim, shape, 0, strides),) if 0 not in shape else ()
    return Part(op, shape, order), Layout(shape, boxes, local_shape=shape)


def _each(rows: int | Sequence[int] | None, ranks: int) -> tuple[int, ...] | None:
    if rows is None:
        return None
    each = (int(rows),) * ranks if isinstance(rows, int) else tuple(int(n) for n in rows)
    if len(each) != ranks or min(each) < 0:
        raise LayoutError(
            f"consistent(rows={rows}): one number of rows for all, or one for each of the {ranks} "
            "data ranks, none of them negative"
        )
    return each
