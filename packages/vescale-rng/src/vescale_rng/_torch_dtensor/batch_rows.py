"""Locates a tensor's rows in the global batch, draw by draw, as data ranks agree.

A rank sees its own number of rows and not that of others, and the numbers that it draws depend on
all of them. Which ranks' rows have changed since the last draw, no rank can know by itself: were a
number cached, a rank whose batch is shorter would ask while the others do not, and all would
wait for ever. So each draw asks, with a message of some 300 bytes, unless the user has said how
many rows there are (`rows`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch

from vescale_rng._errors import LayoutError, StateError
from vescale_rng._layout.layout import Box, Ints, ShardLayout, dense_strides
from vescale_rng._state.fingerprint import fingerprint
from vescale_rng._torch_dtensor.current_rule import batch_dim_inside
from vescale_rng._torch_dtensor.data_axes import DataAxes
from vescale_rng._torch_dtensor.row_messages import DIMS, Message, RankPart, exchange


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

    @property
    def asks_nobody(self) -> bool:
        """Whether draws go by the declared rows: after the first one has compared them."""
        return self._drawn and not self._asks

    def layout(self, part: RankPart, held: ShardLayout | None, generator: Any) -> ShardLayout:
        """Return the layout of a rank's part of what all data ranks draw.

        Every data rank must call it for the same op. What one rank cannot draw is raised on every
        rank, but for one case: once the first draw has compared what `rows` says, no rank is asked
        any more, and a part that contradicts `rows` later is an error of its rank alone.

        Args:
            part: what this rank draws into.
            held: which elements of its data rank's rows this rank holds; None where that is unknown
                because of `part.trouble`.
            generator: the one that is drawn from, to compare.

        Raises:
            LayoutError: the parts do not make one tensor.
            StateError: on every rank, where the generators differ.
        """
        part, dim = self._dim_of(part)
        part = self._by_rows(part, dim)
        if self._asks:
            found = self._ask(part, dim, generator)
            sizes = [one.shape[dim] for one in found]
            # The memory order of one device shows where most elements are: a part with one row,
            # or none, has several orders at once.
            order = max(found, key=lambda one: prod(one.shape)).order
        else:
            self._compare_told(part, dim, generator)
            # Without a message the own memory order has to do: parts of one row leave it open.
            sizes, order = self._told(part.shape[dim]), part.order
        assert held is not None
        return _moved(held, dim, tuple(sizes), self.axes.index, order)

    def close(self) -> None:
        """Compare the generators once more, where draws went by declared rows. A collective."""
        if self.asks_nobody:
            self._check_step([row[0] for row in self.axes.gather([fingerprint()])], "at the end")

    def _dim_of(self, part: RankPart) -> tuple[RankPart, int]:
        """Return the batch's dim of a part, and the part with what is wrong with it."""
        ndim = len(part.shape)
        try:
            dim = self._chosen_dim(part.shape)
        # A function of the user's may fail for the shape of this rank alone.
        except Exception as error:
            why = f"consistent(batch_dim=...) raised {type(error).__name__}: {error}"
            return part.with_trouble(f"{part.op} of shape {part.shape}: {why}"), 0
        if not -ndim <= dim < ndim or ndim > DIMS:
            return part.with_trouble(
                f"{part.op} of shape {part.shape} has no dim {dim}, which is the batch's by "
                f"consistent(batch_dim=...), or more than {DIMS} dims"
            ), 0
        return part, dim % ndim

    def _chosen_dim(self, shape: Ints) -> int:
        dim = batch_dim_inside()
        if dim is None:
            dim = self._dim(shape) if callable(self._dim) else self._dim
        return int(dim)

    def _by_rows(self, part: RankPart, dim: int) -> RankPart:
        """Return a part with what is wrong with it by the declared numbers of rows."""
        if self._rows is None or self._asks or part.trouble:
            return part
        mine, size = self._rows[self.axes.index], part.shape[dim]
        if size % mine == 0:
            return part
        return part.with_trouble(
            f"{part.op} of shape {part.shape}: dim {dim} has {size} elements, which are no "
            f"multiple of the {mine} rows that consistent(rows={list(self._rows)}) gives this "
            "rank. Leave out `rows`, and the ranks agree on their numbers at each draw"
        )

    def _told(self, size: int) -> list[int]:
        """Return the size of every rank's part by the declared rows, given this rank's."""
        assert self._rows is not None
        return [rows * (size // self._rows[self.axes.index]) for rows in self._rows]

    def _ask(self, part: RankPart, dim: int, generator: Any) -> list[Message]:
        found = exchange(self.axes, part, dim, fingerprint(generator))
        self._check_step([one.stream for one in found], f"at {part.op}")
        return found

    def _compare_told(self, part: RankPart, dim: int, generator: Any) -> None:
        """Ask at the first draw, to compare all ranks' parts with what `rows` says."""
        if self._drawn:
            if part.trouble:
                # The others do not receive any more: waiting for them would hide the error.
                raise LayoutError(
                    f"{part.trouble}. Only this rank can know: the others go by `rows` and go on"
                )
            return
        sizes = [one.shape[dim] for one in self._ask(part, dim, generator)]
        # By the first rank's part, so that all ranks find the same.
        assert self._rows is not None
        times = sizes[0] // self._rows[0]
        if sizes != [rows * times for rows in self._rows]:
            raise LayoutError(
                f"{part.op}: dim {dim} has {sizes} elements on the data ranks "
                f"{list(self.axes.ranks)}, which are not in the proportion of "
                f"consistent(rows={list(self._rows)}). Leave out `rows`, and the ranks agree on "
                "their numbers at each draw"
            )
        self._drawn = True

    def _check_step(self, streams: list[int], where: str) -> None:
        if len(set(streams)) > 1:
            first = streams[0]
            others = [r for r, s in zip(self.axes.ranks, streams, strict=True) if s != first]
            raise StateError(
                f"{where} the random generators of the data ranks differ: rank(s) {others} from "
                f"rank {self.axes.ranks[0]}. Seed every rank alike (torch.manual_seed(0), no rank "
                "in it) and draw the same ops everywhere; vescale_rng.check_in_step() tells more"
            )


@lru_cache(maxsize=1024)  # one object for equal arguments: what is planned on it is kept
def _moved(held: ShardLayout, dim: int, sizes: Ints, index: int, order: Ints) -> ShardLayout:
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


def part_of(op: str, tensor: torch.Tensor) -> tuple[RankPart, ShardLayout | None]:
    """Return what is declared of a plain tensor, and its layout within its rank's rows."""
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
        return RankPart(op, shape, tuple(range(tensor.ndim)), trouble), None
    boxes = (Box((0,) * tensor.ndim, shape, 0, strides),) if 0 not in shape else ()
    return RankPart(op, shape, order), ShardLayout(shape, boxes, local_shape=shape)


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
