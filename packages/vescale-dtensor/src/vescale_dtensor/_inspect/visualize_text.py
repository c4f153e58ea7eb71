"""Draws pictures of layouts in box-drawing characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vescale_dtensor._inspect.visualize_panels import Panel, Picture
from vescale_dtensor._layout.intervals import Interval

# Characters for all columns together, and lines for all rows, if labels need no more.
_WIDTH, _HEIGHT = 48, 8


def text(picture: Picture) -> str:
    """The picture as lines of text."""
    lines = [picture.title, *(f"  {axis}" for axis in picture.axes)]
    for panel in picture.panels:
        lines += ["", *([panel.title] if panel.title else []), *_panel(panel, picture)]
    lines += ["", *picture.notes]
    return "\n".join(line.rstrip() for line in lines)


def _panel(panel: Panel, picture: Picture) -> Iterator[str]:
    """The lines of one panel."""
    down = picture.row_dim is not None
    labels = [_interval(rows) if down else "" for rows in panel.rows]
    margin = max([len(label) for label in labels] + [len(_dim(picture.row_dim))]) + 1
    needed = [max(len(cell) for cell in column) + 2 for column in zip(*panel.holders, strict=True)]
    widths = _stretched(panel.columns, needed, _WIDTH)
    heights = _stretched(panel.rows, [1] * len(panel.rows), _HEIGHT if len(panel.rows) > 1 else 1)
    if picture.column_dim is not None:
        heads = [_interval(interval) for interval in panel.columns]
        widths = [max(width, len(head) + 1) for width, head in zip(widths, heads, strict=True)]
        heads = [head.center(width) for head, width in zip(heads, widths, strict=True)]
        yield " " * margin + " " + " ".join(heads) + f"  {_dim(picture.column_dim)}"
    yield _dim(picture.row_dim).rjust(margin - 1) + " " + _rule("┌┬┐", widths)
    for index, (label, cells, height) in enumerate(
        zip(labels, panel.holders, heights, strict=True)
    ):
        if index:
            yield " " * margin + _rule("├┼┤", widths)
        for line in range(height):
            middle = line == height // 2
            shown = [c if middle else "" for c in cells]
            padded = [cell.center(width) for cell, width in zip(shown, widths, strict=True)]
            yield (label if middle else "").rjust(margin - 1) + " │" + "│".join(padded) + "│"
    yield " " * margin + _rule("└┴┘", widths)


def _rule(corners: str, widths: Sequence[int]) -> str:
    """A horizontal line; `corners`: its left end, its crossings and its right end."""
    between = corners[1].join("─" * width for width in widths)
    return corners[0] + between + corners[2]


def _interval(interval: Interval) -> str:
    return f"{interval[0]}:{interval[1]}"


def _dim(dim: int | None) -> str:
    return "" if dim is None else f"dim {dim}"


def _stretched(intervals: Sequence[Interval], needed: Sequence[int], total: int) -> list[int]:
    """Sizes in proportion to extents, but large enough for the labels inside."""
    covered = max(1, sum(high - low for low, high in intervals))
    return [
        max(need, round(total * (high - low) / covered))
        for (low, high), need in zip(intervals, needed, strict=True)
    ]
