"""Computes the content of a picture of a layout: panels of cells, and the ranks that hold each.

A cell is a box of the tensor that every rank holds completely or not at all. All ranks compute the
same picture from the layout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, product

import torch

from vescale_dtensor._layout.intervals import Interval
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.mesh import Coordinate, axis_names, coordinates, describe
from vescale_dtensor._layout.notation import short
from vescale_dtensor._layout.placements import Partial
from vescale_dtensor._layout.shard_geometry import Box, owned, strided_boxes

_MOST_RANKS_NAMED = 6


@dataclass(frozen=True)
class Panel:
    """A slice of the tensor as a table over two dims.

    Attributes:
        title: which slice; empty if there is only one.
        rows, columns: the intervals of the two dims, whose products are the cells; a single one
            where there is no such dim.
        holders: per row, per column: the ranks that hold the cell, in words.
    """

    title: str
    rows: tuple[Interval, ...]
    columns: tuple[Interval, ...]
    holders: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn.

    Attributes:
        title: the tensor in its short form.
        axes: one line for each mesh axis: its name and placement.
        row_dim, column_dim: the dims that run down and across; None for none.
        panels: one for each combination of intervals of the other dims.
        notes: how to read it, and which ranks hold nothing.
        partial: whether ranks hold partial values.
    """

    title: str
    axes: tuple[str, ...]
    row_dim: int | None
    column_dim: int | None
    panels: tuple[Panel, ...]
    notes: tuple[str, ...]
    partial: bool


def picture_of(layout: Layout, shape: Shape, dtype: torch.dtype, dims: tuple[int, ...]) -> Picture:
    """The picture of a tensor.

    Args:
        layout: its layout.
        shape: global shape.
        dtype: its dtype.
        dims: at most two dims, which run down and across each panel.
    """
    boxes = {c: _boxes(layout, shape, c) for c in coordinates(layout.sizes)}
    boundaries = [_boundaries(dim, extent, boxes.values()) for dim, extent in enumerate(shape)]
    who = _Holders(layout, boxes, boundaries)
    row, column = ((None, None, *dims))[-2:]
    others = [dim for dim in range(len(shape)) if dim not in dims]
    panels = []
    for chosen in product(*(boundaries[dim] for dim in others)):
        fixed = dict(zip(others, chosen, strict=True))
        rows = boundaries[row] if row is not None else ((0, 1),)
        columns = boundaries[column] if column is not None else ((0, 1),)
        holders = tuple(
            tuple(who.of(_cell(len(shape), fixed, row, r, column, c)) for c in columns)
            for r in rows
        )
        title = (
            _slice(len(shape), fixed, shape) if any(len(boundaries[d]) > 1 for d in others) else ""
        )
        panels.append(Panel(title, rows, columns, holders))
    names = axis_names(layout.mesh)
    return Picture(
        title=f"{short(shape, dtype, layout)} on {describe(layout.mesh)}",
        axes=tuple(f"{n}: {p}" for n, p in zip(names, layout.placements, strict=True)),
        row_dim=row,
        column_dim=column,
        panels=tuple(panels),
        notes=tuple(_notes(layout, who.idle())),
        partial=bool(layout.partial),
    )


def _notes(layout: Layout, idle: str) -> Iterator[str]:
    """How to read the picture, one line each; `idle`: the ranks without elements."""
    yield "cells name the ranks that hold them"
    for op in sorted({p.reduce_op for p in layout.placements if isinstance(p, Partial)}):
        sign = "a+b" if op == "sum" else f"{op}(a, b)"
        yield f"{sign}: the value is the {op} over a and b"
    if layout.partial and layout.replicated:
        yield "x = y: equal copies"
    if idle:
        yield f"ranks without elements: {idle}"


def _boxes(layout: Layout, shape: Shape, coordinate: Coordinate) -> list[Box]:
    """The boxes of the global tensor that one coordinate owns, without empty ones."""
    groups = owned(layout.placements, layout.sizes, shape, coordinate)
    per_group = [strided_boxes(group) for group in groups]
    found = [tuple(i for cell in chosen for i in cell.box) for chosen in product(*per_group)]
    return [box for box in found if all(low < high for low, high in box)]


def _boundaries(dim: int, extent: int, boxes: Iterable[list[Box]]) -> tuple[Interval, ...]:
    """The intervals of a dim between all positions at which a box of some rank begins or ends."""
    ends = {0, extent}
    for owned_boxes in boxes:
        for box in owned_boxes:
            ends.update(box[dim])
    return tuple(pairwise(sorted(ends))) or ((0, 0),)


def _cell(
    ndim: int,
    fixed: dict[int, Interval],
    row: int | None,
    at_row: Interval,
    column: int | None,
    at_column: Interval,
) -> Box:
    """The box of a cell: `fixed` are the intervals of the dims that do not run in the panel."""
    known = {**fixed}
    if row is not None:
        known[row] = at_row
    if column is not None:
        known[column] = at_column
    return tuple(known[dim] for dim in range(ndim))


def _slice(ndim: int, fixed: dict[int, Interval], shape: Shape) -> str:
    """A slice as it is written in Python: `[0:2, :, :]`."""
    parts = (
        f"{fixed[dim][0]}:{fixed[dim][1]}"
        if fixed.get(dim, (0, shape[dim])) != (0, shape[dim])
        else ":"
        for dim in range(ndim)
    )
    return f"[{', '.join(parts)}]"


class _Holders:
    """Which ranks hold each cell, in words.

    Ranks whose partial values are reduced are joined by the reduction (`0+1`), and equal copies of
    a result by `=`.
    """

    def __init__(
        self,
        layout: Layout,
        boxes: dict[Coordinate, list[Box]],
        boundaries: Sequence[tuple[Interval, ...]],
    ) -> None:
        self._layout = layout
        self._boxes = boxes
        # Filled from the boxes: asking every rank about every cell would cost their product.
        self._holders: dict[Box, list[Coordinate]] = {}
        starts = [[low for low, _ in intervals] for intervals in boundaries]
        for coordinate, own_boxes in boxes.items():
            for cell in dict.fromkeys(
                cell for box in own_boxes for cell in _cells(box, boundaries, starts)
            ):
                self._holders.setdefault(cell, []).append(coordinate)
        ranks = layout.mesh.mesh.reshape(-1).tolist()
        self.rank: dict[Coordinate, int] = dict(zip(boxes, ranks, strict=True))

    def idle(self) -> str:
        """The ranks that hold nothing."""
        return ranks_in_words([self.rank[c] for c, boxes in self._boxes.items() if not boxes])

    def of(self, cell: Box) -> str:
        """The ranks that hold a cell; empty for a cell without elements."""
        if any(low == high for low, high in cell):
            return ""
        found = self._holders.get(cell, [])
        if not self._layout.partial:
            return ranks_in_words([self.rank[c] for c in found])
        copies = self._terms(found, 0)
        if len(copies) > _MOST_RANKS_NAMED:
            copies = [*copies[:2], "…", copies[-1]]
        return " = ".join(copies)

    def _terms(self, found: Sequence[Coordinate], axis: int) -> list[str]:
        """The equal copies that these coordinates hold, in words; one mesh axis per recursion."""
        if axis == len(self._layout.sizes):
            return [ranks_in_words([self.rank[c] for c in found])]
        present = sorted({c[axis] for c in found})
        parts = [[c for c in found if c[axis] == index] for index in present]
        inner = [self._terms(part, axis + 1) for part in parts]
        placement = self._layout.placements[axis]
        if not isinstance(placement, Partial):
            return [words for part in inner for words in part]
        # Copies are in the same order at every coordinate of a partial axis, so the n-th result is
        # the reduction of all n-th copies.
        return [_reduced(placement.reduce_op, partials) for partials in zip(*inner, strict=True)]


def _reduced(op: str, partials: Sequence[str]) -> str:
    """Ranks joined by a reduction, in words; many of them are shortened."""
    if len(partials) == 1:
        return partials[0]
    listed = list(partials)
    if len(listed) > _MOST_RANKS_NAMED:
        listed = [*listed[:2], "…", listed[-1]]
    return "+".join(listed) if op == "sum" else f"{op}({', '.join(listed)})"


def _cells(
    box: Box, boundaries: Sequence[tuple[Interval, ...]], starts: Sequence[list[int]]
) -> Iterator[Box]:
    """The cells that a box consists of."""
    # By bisection: a box begins and ends at positions where cells do.
    per_group = [
        intervals[bisect_left(begin, low) : bisect_left(begin, high)]
        for (low, high), intervals, begin in zip(box, boundaries, starts, strict=True)
    ]
    return product(*per_group)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as text, consecutive ones as a range and many of them shortened: `0-3, 8`."""
    ordered = sorted(ranks)
    # In a run of consecutive numbers, number minus index is constant.
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])
    ]
    words = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    if len(words) > _MOST_RANKS_NAMED:
        words = [*words[:3], "…", words[-1]]
    return ", ".join(words)
