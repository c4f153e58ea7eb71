"""A resolved plan for programs (JSON) and as a picture (SVG) of which ranks hold what."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from itertools import product
from typing import Any, Final

from vescale_parallel._check.report import Report
from vescale_parallel._common.messages import human_bytes
from vescale_parallel._notation.rows import ParameterRow

_WIDTH, _HEIGHT, _HEAD, _GAP, _COLUMNS = 220, 120, 52, 24, 3
_MOST_CELLS: Final = 16
"""Of one dim: further shards are one hatched cell, as they could not be told apart."""
_COLOURS: Final = ("#8ecae6", "#ffb703", "#90be6d", "#f28482", "#cdb4db", "#84a59d")


def report_json(report: Report) -> str:
    """Return all rows of a report; bytes and shapes as numbers."""
    content = {
        "mesh": dict(report.mesh),
        "batch": None if report.batch is None else str(report.batch),
        "bytes_per_rank": report.bytes_per_rank,
        "bytes_on_one_device": report.total_bytes,
        "notes": list(report.notes),
        "parameters": [_parameter(row) for row in report.parameters],
        "boundaries": [
            {"module": row.module, "rule": row.rule, "in_out": row.boundary.text}
            for row in report.boundaries
        ],
        "buffers": [
            {
                "unit": row.unit,
                "zero": row.zero,
                "dtype": str(row.dtype).removeprefix("torch."),
                "stored_bytes": row.stored_bytes,
                "gathered_bytes": row.gathered_bytes,
                "gradient_bytes": row.gradient_bytes,
            }
            for row in report.buffers
        ],
        "batch_is": report.batch_is,
        "recomputed": [
            {"module": row.module, "rule": row.rule, "kind": row.kind, "saved": list(row.saved)}
            for row in report.regions
        ],
        "captured": [asdict(unit) for unit in report.captured],
        "activation_bytes_a_token": _activations(report),
    }
    return json.dumps(content, indent=2)


def _activations(report: Report) -> Mapping[str, float]:
    """Of a rank, estimated, with what the plan recomputes and without."""
    found = report.activations
    token = float(found.sharers)
    return {"kept": found.bytes_of(token, found.regions), "without": found.bytes_of(token, ())}


def _parameter(row: ParameterRow) -> Mapping[str, Any]:
    return {
        "names": list(row.names),
        "rule": row.rule,
        "layout": str(row.layout),
        "zero": row.zero,
        "global_shape": list(row.global_shape),
        "local_shape": list(row.local_shape),
        "local_bytes": row.local_bytes,
        "uneven": row.uneven,
    }


def report_svg(report: Report) -> str:
    """Draw one panel for each rule and shape: the tensor as it is cut, and who holds what."""
    panels: dict[tuple[str, tuple[int, ...]], list[ParameterRow]] = {}
    for row in report.parameters:
        panels.setdefault((row.rule, row.global_shape), []).append(row)
    drawn = [
        f'<g transform="translate({_GAP + at % _COLUMNS * (_WIDTH + _GAP)},'
        f'{_GAP + at // _COLUMNS * (_HEIGHT + _HEAD + _GAP)})">{"".join(_panel(rows, report))}</g>'
        for at, rows in enumerate(panels.values())
    ]
    width = _GAP + _COLUMNS * (_WIDTH + _GAP)
    height = _GAP + math.ceil(len(drawn) / _COLUMNS) * (_HEIGHT + _HEAD + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="10">{"".join(drawn)}</svg>'
    )


def _panel(rows: Sequence[ParameterRow], report: Report) -> Iterator[str]:
    row = rows[0]
    more = f" and {len(rows) - 1} like it" if len(rows) > 1 else ""
    shape = " x ".join(map(str, row.global_shape)) or "scalar"
    zero = f", then flat over {report.over} (zero={row.zero})" if row.zero else ""
    lines = [
        f"{row.name}{more}",
        f"{shape}, {row.layout}{zero}",
        f"{human_bytes(row.local_bytes)} a shard; rule {row.rule}",
    ]
    for at, line in enumerate(lines):
        yield f'<text y="{12 + 14 * at}">{escape(line)}</text>'
    # The last two dims are down and across; earlier ones are cut down as well, as memory has them.
    cuts = [_cuts(row, report, dim) for dim in range(len(row.global_shape))]
    down, across = list(_nested(cuts[:-1])), cuts[-1] if cuts else [""]
    tall, wide = _HEIGHT / len(down), _WIDTH / len(across)
    for (y, one), (x, other) in product(enumerate(down), enumerate(across)):
        held = ", ".join(part for part in (one, other) if part) or "every rank"
        colour = _COLOURS[(y * len(across) + x) % len(_COLOURS)]
        left, top = round(x * wide, 2), round(_HEAD + y * tall, 2)
        yield (
            f'<rect x="{left}" y="{top}" width="{wide:.2f}" height="{tall:.2f}" fill="{colour}" '
            f'stroke="white"><title>{escape(held)}</title></rect>'
        )
        if tall >= 12 and wide >= 6 * len(held):
            yield f'<text x="{left + 4}" y="{top + tall / 2 + 4:.2f}">{escape(held)}</text>'


def _cuts(row: ParameterRow, report: Report, dim: int) -> list[str]:
    """Return the coordinates that hold each part of a dim, in the order of the parts."""
    ndim = len(row.global_shape)
    axes = [(axis, n) for axis, n in report.mesh if row.layout.dim_of(axis, ndim) == dim]
    places = product(*(range(size) for _, size in axes))
    parts = [
        ", ".join(f"{axis}={at}" for (axis, _), at in zip(axes, place, strict=True))
        for place in places
    ]
    if len(parts) > _MOST_CELLS:
        surplus = len(parts) - _MOST_CELLS + 1
        parts = [*parts[: _MOST_CELLS - 1], f"{surplus} more"]
    return parts


def _nested(cuts: Sequence[Sequence[str]]) -> Iterator[str]:
    for parts in product(*cuts):
        yield ", ".join(part for part in parts if part)
