"""Draws pictures of layouts as SVG: a complete document, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate

from vescale_dtensor._inspect.visualize_panels import Panel, Picture
from vescale_dtensor._layout.intervals import Interval

_FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
_MARGIN, _LINE = 24, 20
# The drawing area of one panel, and the space around it for labels.
_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 260, 58, 46
_SMALLEST = 22
_PER_ROW = 3
# Pale fills, on which black text is readable. Each distinct set of ranks gets the next one.
_FILLS = ["#cfe3f7", "#fbdcc0", "#d3ecd0", "#f3d3e4", "#e3dbf2", "#fbf0b8", "#cdeae8", "#e6ddd3"]
_INK, _FAINT = "#1f2933", "#66727f"


def svg(picture: Picture) -> str:
    """The picture as an SVG document."""
    holders = [h for panel in picture.panels for row in panel.holders for h in row if h]
    distinct = list(dict.fromkeys(holders))
    fills = {holder: _FILLS[i % len(_FILLS)] for i, holder in enumerate(distinct)}
    columns = min(len(picture.panels), _PER_ROW)
    rows = -(-len(picture.panels) // columns)
    pitch_x, pitch_y = _LEFT + _WIDTH + _MARGIN, _TOP + _height(picture) + _MARGIN
    head = _MARGIN + _LINE * (1 + len(picture.axes)) + 6
    body: list[str] = [*_heading(picture)]
    for index, panel in enumerate(picture.panels):
        column, down = index % columns, index // columns
        body += _panel(panel, picture, fills, (_MARGIN + column * pitch_x, head + down * pitch_y))
    foot = head + rows * pitch_y
    for index, note in enumerate(picture.notes):
        body.append(_text(_MARGIN, foot + index * _LINE, note, color=_FAINT))
    widest = max(
        8.4 * len(picture.title), *(7 * len(line) for line in (*picture.axes, *picture.notes))
    )
    width = max(_MARGIN + columns * pitch_x, 2 * _MARGIN + round(widest))
    height = foot + len(picture.notes) * _LINE
    return "\n".join([_opening(width, height, picture), *body, "</svg>"])


def _opening(width: int, height: int, picture: Picture) -> str:
    """The start of the document: size, title, the hatching of partial values, background."""
    hatch = (
        '<defs><pattern id="terms" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="7" stroke="#ffffff" '
        'stroke-width="3" stroke-opacity="0.7"/></pattern></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{_FONT}" font-size="13" role="img">\n'
        f"<title>{escape(picture.title)}</title>\n{hatch}\n"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    )


def _heading(picture: Picture) -> list[str]:
    """The title, and a line for each mesh axis."""
    lines = [_text(_MARGIN, _MARGIN + 8, picture.title, weight=600, size=15)]
    for index, axis in enumerate(picture.axes):
        lines.append(_text(_MARGIN, _MARGIN + 8 + _LINE * (index + 1), axis, color=_FAINT))
    return lines


def _height(picture: Picture) -> int:
    """The height of every panel: enough for the smallest readable row in each."""
    if picture.row_dim is None:
        return 64
    return max(_HEIGHT, max(len(panel.rows) for panel in picture.panels) * _SMALLEST)


def _panel(panel: Panel, picture: Picture, fills: dict[str, str], at: tuple[int, int]) -> list[str]:
    """One panel with its labels; `at`: its left upper corner."""
    left, top = at[0] + _LEFT, at[1] + _TOP
    xs = _edges(panel.columns, left, _WIDTH)
    ys = _edges(panel.rows, top, _height(picture))
    parts = []
    if panel.title:
        parts.append(_text(left, top - 30, panel.title, weight=600))
    for row, holders in enumerate(panel.holders):
        for column, holder in enumerate(holders):
            area = (xs[column], ys[row], xs[column + 1], ys[row + 1])
            parts += _cell(area, holder, fills, hatched=picture.partial)
    if picture.column_dim is not None:
        parts += [
            _text((a + b) / 2, top - 8, f"{low}:{high}", anchor="middle", color=_FAINT, size=11)
            for (low, high), a, b in zip(panel.columns, xs, xs[1:], strict=False)
        ]
        parts.append(_text(left + _WIDTH, top - 24, f"dim {picture.column_dim} →", anchor="end"))
    if picture.row_dim is not None:
        parts += [
            _text(left - 8, (a + b) / 2 + 4, f"{low}:{high}", anchor="end", color=_FAINT, size=11)
            for (low, high), a, b in zip(panel.rows, ys, ys[1:], strict=False)
        ]
        parts.append(_text(left - 8, top - 8, f"dim {picture.row_dim} ↓", anchor="end"))
    return parts


def _cell(
    area: tuple[float, float, float, float], holder: str, fills: dict[str, str], *, hatched: bool
) -> list[str]:
    """One cell: fill, hatching if its values are partial, frame and label."""
    x, y, right, bottom = area
    place = f'x="{x:.1f}" y="{y:.1f}" width="{right - x:.1f}" height="{bottom - y:.1f}"'
    parts = [f'<rect {place} fill="{fills.get(holder, "none")}"/>']
    if hatched and holder:
        parts.append(f'<rect {place} fill="url(#terms)"/>')
    parts.append(f'<rect {place} fill="none" stroke="{_INK}" stroke-width="1"/>')
    if not holder:
        return parts
    # By the approximate width of a character: long lists get smaller rather than run over.
    size = min(13.0, max(6.0, 1.7 * (right - x - 6) / len(holder)))
    middle, base = (x + right) / 2, (y + bottom) / 2 + size / 3
    if hatched:
        parts.append(_text(middle, base, holder, anchor="middle", size=size, outline=True))
    return [*parts, _text(middle, base, holder, anchor="middle", size=size)]


def _edges(intervals: Sequence[Interval], start: float, length: float) -> list[float]:
    """Positions where cells begin and end: in proportion to extents, but none unreadably small."""
    total = max(1, sum(high - low for low, high in intervals))
    smallest = min(_SMALLEST, length / len(intervals))
    raw = [max(smallest, length * (high - low) / total) for low, high in intervals]
    excess = sum(raw) - length
    # What small cells got in excess is taken from the others, in proportion to what each can spare.
    spare = sum(size - smallest for size in raw) or 1.0
    sizes = [size - excess * (size - smallest) / spare for size in raw]
    return list(accumulate(sizes, initial=start))


def _text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "start",
    color: str = _INK,
    size: float = 13,
    weight: int = 400,
    outline: bool = False,
) -> str:
    # A white outline, so that hatching does not touch the label.
    stroke = ' stroke="#ffffff" stroke-width="4" stroke-linejoin="round"' if outline else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size:g}" '
        f'font-weight="{weight}"{stroke}>{escape(content)}</text>'
    )
