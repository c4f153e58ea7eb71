"""A resolved plan as a picture (SVG): each kind of parameter, cut as it is, and who holds what.

A panel is drawn to scale: uneven shards, blocks that are sharded one by one, and ranks that hold
nothing look so. Below it is what `zero` makes of such a shard.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate, product
from typing import Any, Final

from vescale_comm.agreement import compact

from vescale_parallel._check.report import Report
from vescale_parallel._common.messages import human_bytes
from vescale_parallel._notation.rows import ParameterRow
from vescale_parallel._notation.segments import Place, Segment, segments_of
from vescale_parallel._zero.flat_plan import FlatPlan
from vescale_parallel._zero.rules import LEVELS

_WIDTH, _HEIGHT, _STRIP, _GAP, _COLUMNS = 300, 110, 16, 28, 3
_LINE: Final = 14
_LETTER: Final = 5.6
"""Width of an average letter; what is longer than its panel is shortened."""
_MOST_CELLS: Final = 48
"""Of one dim: further ones are one cell, which counts them, and nothing is to scale any more."""
_COLOURS: Final = ("#8ecae6", "#ffb703", "#90be6d", "#f28482", "#cdb4db", "#84a59d")
_REST: Final = "#dddddd"


def report_svg(report: Report) -> str:
    """Draw one panel for each kind of parameter: by rule, layout, shape, ZeRO level and stage."""
    kinds: dict[Any, list[ParameterRow]] = {}
    for row in report.parameters:
        stage = _stage(row, report)
        kind = (row.rule, row.layout, row.global_shape, row.dtype, row.zero, row.owned, stage)
        kinds.setdefault(kind, []).append(row)
    shares = _shares(report)
    panels = [_panel(rows, report, shares) for rows in kinds.values()]
    lines = [panels[at : at + _COLUMNS] for at in range(0, len(panels), _COLUMNS)]
    heights = [max(height for height, _ in line) for line in lines]
    tops = list(accumulate((one + _GAP for one in heights), initial=_GAP + 2 * _LINE))
    drawn = [
        f'<g transform="translate({_GAP + column * (_WIDTH + _GAP)},{top})">{content}</g>'
        # `tops` has one more: where the picture ends.
        for line, top in zip(lines, tops, strict=False)
        for column, (_, content) in enumerate(line)
    ]
    sizes = ", ".join(f"{axis}={size}" for axis, size in report.mesh)
    head = f"mesh({sizes}), batch {report.batch or 'left alone'}"
    width = _GAP + _COLUMNS * (_WIDTH + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tops[-1]}" '
        f'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{_GAP}" y="{_GAP}" font-size="13">{escape(head)}</text>{"".join(drawn)}</svg>'
    )


def _panel(
    rows: Sequence[ParameterRow], report: Report, shares: dict[str, tuple[int, ...]]
) -> tuple[int, str]:
    """Return the height of a panel, and what is in it."""
    row, top = rows[0], 0
    parts = []
    for line in _lines(rows, report):
        top += _LINE
        parts.append(f'<text y="{top - 2}">{_shortened(line, _WIDTH)}</text>')
    tall = _HEIGHT if len(row.global_shape) > 1 else 2 * _STRIP
    held, cells = _tensor(row, report, top + 4, tall)
    parts += cells
    top += 4 + tall
    for line in _without(held, row, report):
        top += _LINE
        parts.append(f'<text y="{top - 1}" font-style="italic">{escape(line)}</text>')
    if row.zero:
        parts.append(f'<text y="{top + _LINE - 1}">{_shortened(_zero(row, report), _WIDTH)}</text>')
        parts += _stored([shares[one.name] for one in rows], report.over, top + _LINE + 4)
        top += _LINE + 4 + _STRIP
    return top, "".join(parts)


def _lines(rows: Sequence[ParameterRow], report: Report) -> Iterator[str]:
    row, stage = rows[0], _stage(rows[0], report)
    yield row.name + (f" and {len(rows) - 1} like it" if len(rows) > 1 else "")
    shape = " x ".join(map(str, row.global_shape)) or "scalar"
    at_most = " at most" if row.uneven else ""
    yield f"{shape}, {row.layout}; {human_bytes(row.local_bytes)} a shard{at_most}"
    yield f"rule {row.rule}" + ("" if stage is None else f"; on {stage} alone")


def _stage(row: ParameterRow, report: Report) -> str | None:
    owner = report.split.owners[row.name] if report.split is not None else None
    return None if owner is None else f"pp={owner}"


def _tensor(
    row: ParameterRow, report: Report, top: float, tall: float
) -> tuple[list[Place], list[str]]:
    """Return who holds any of a tensor, and its cells; their titles say which elements they are."""
    # The last dim is across, all others are down, as memory has them.
    shape = row.global_shape or (1,)
    dims = [segments_of(row.layout, shape, dim, report.mesh) for dim in range(len(shape))]
    down = _spans(list(product(*dims[:-1])), tall)
    across = _spans([(one,) for one in dims[-1]], _WIDTH)
    colours: dict[Place, str] = {}
    cells = []
    for (y, height, outer), (x, width, inner) in product(down, across):
        if outer is None or inner is None:
            cells.append(_cell(x, y + top, width, height, "and so on", _REST))
            continue
        parts = (*outer, *inner)
        place = tuple(one for part in parts for one in part.place)
        # By its ranks: what the same ranks hold has one colour, wherever it lies.
        colour = colours.setdefault(place, _COLOURS[len(colours) % len(_COLOURS)])
        held = _held(place, row, report)
        elements = ", ".join(f"{part.low}:{part.high}" for part in parts)
        title = f"{held}: [{elements}]"
        cells.append(_cell(x, y + top, width, height, held, colour, title))
    return list(colours), cells


def _held(place: Place, row: ParameterRow, report: Report) -> str:
    stage = _stage(row, report)
    parts = ([stage] if stage else []) + [f"{axis}={at}" for axis, at in place]
    return ", ".join(parts) or "every rank"


def _without(places: Sequence[Place], row: ParameterRow, report: Report) -> Iterator[str]:
    """Name the coordinates that hold nothing, which no cell shows."""
    ndim = len(row.global_shape)
    if not math.prod(row.global_shape):
        return
    for axis, size in report.mesh:
        if row.layout.dim_of(axis, ndim) is not None and size <= _MOST_CELLS:
            idle = sorted(set(range(size)) - {dict(place).get(axis, -1) for place in places})
            if idle:
                yield f"{axis}={compact(idle)} holds nothing"


def _zero(row: ParameterRow, report: Report) -> str:
    how = "each on one rank" if row.owned else "flat"
    return f"zero={row.zero} over {report.over}, {how}: {LEVELS[row.zero]}"


def _shares(report: Report) -> dict[str, tuple[int, ...]]:
    """Return, for each parameter that `zero` shards, the elements that each rank of it stores."""
    buffers = report.buffers
    if report.split is not None:
        buffers = tuple(one for of_rank in report.split.buffers for one in of_rank)
    found: dict[str, tuple[int, ...]] = {}
    # By object: buffers of units that look alike may share one plan, and a plan is no small value
    # to compare.
    for plan in {id(one.plan): one.plan for one in buffers}.values():
        for name, shares in _shares_of(plan):
            found.setdefault(name, shares)
    return found


def _shares_of(plan: FlatPlan) -> Iterator[tuple[str, tuple[int, ...]]]:
    shards = [plan.ranges(rank) for rank in range(plan.shards)]
    for at, slot in enumerate(plan.slots):
        yield slot.names[0], tuple(of[at][1] - of[at][0] for of in shards)


def _stored(shares: Sequence[tuple[int, ...]], over: str, top: float) -> Iterator[str]:
    """Draw what each rank of `zero` stores of the parameters of a panel, all together."""
    summed: Counter[int] = Counter()
    for one in shares:
        summed.update(dict(enumerate(one)))
    whole = summed.total() or 1
    held = [(Segment(0, n, ((over, at),)),) for at, n in sorted(summed.items()) if n]
    for number, (x, width, parts) in enumerate(_spans(held, _WIDTH)):
        if parts is None:
            yield _cell(x, top, width, _STRIP, f"{len(held) - number} more", _REST)
            continue
        ((axis, at),) = parts[0].place
        colour = _COLOURS[at % len(_COLOURS)]
        share = f"{axis}={at}: {parts[0].extent / whole:.1%}"
        yield _cell(x, top, width, _STRIP, f"{axis}={at}", colour, share)


def _spans(
    cells: Sequence[tuple[Segment, ...]], length: float
) -> list[tuple[float, float, tuple[Segment, ...] | None]]:
    """Return start, length and parts of cells side by side; None for those that are left out."""
    shown: list[tuple[Segment, ...] | None] = list(cells)
    sizes: list[float] = [math.prod(part.extent for part in one) for one in cells]
    if len(cells) > _MOST_CELLS:
        shown = [*cells[: _MOST_CELLS - 1], None]
        sizes = [1.0] * _MOST_CELLS
    whole = sum(sizes) or 1.0
    starts = accumulate(sizes, initial=0.0)
    spans = zip(starts, sizes, shown, strict=False)
    return [(length * at / whole, length * size / whole, one) for at, size, one in spans]


def _cell(
    x: float, y: float, width: float, height: float, text: str, colour: str, title: str = ""
) -> str:
    shown = ""
    # Of smaller cells the title tells it, which viewers show under the pointer.
    if height >= 11 and width >= _LETTER * len(text) + 4:
        shown = f'<text x="{x + 4:.2f}" y="{y + height / 2 + 4:.2f}">{escape(text)}</text>'
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'fill="{colour}" stroke="white" stroke-width="0.6"><title>{escape(title or text)}</title>'
        f"</rect>{shown}"
    )


def _shortened(text: str, width: float) -> str:
    """Return a text that fits, its middle left out; all of it is in the title."""
    most = int(width / _LETTER)
    if len(text) <= most:
        return escape(text)
    half = (most - 1) // 2
    return f"{escape(text[:half])}…{escape(text[-half:])}<title>{escape(text)}</title>"
