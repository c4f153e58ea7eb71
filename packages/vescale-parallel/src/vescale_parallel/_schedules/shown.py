"""Schedules as tables, pictures and traces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Final

from vescale_parallel._schedules.actions import KINDS
from vescale_parallel._schedules.timeline import Timeline

# One shade for each chunk of a rank: backwards and forwards of later chunks are darker.
_COLORS: Final = {"F": "#7aa6da", "B": "#7cc48a", "I": "#9ad6a5", "W": "#d9b36c"}
_ROW, _LEFT, _TOP, _WIDTH = 22, 70, 30, 1400
# A shape that is narrower than its letters has none.
_LEAST_FOR_TEXT: Final = 16


def as_table(found: Mapping[str, Timeline | str]) -> str:
    """Return one line for each schedule: time, bubble, what ranks keep, messages."""
    lines = [f"{'schedule':<12} {'time':>10} {'bubble':>8} {'kept at most':>13} {'messages':>9}"]
    for name, timeline in found.items():
        if isinstance(timeline, str):
            lines.append(f"{name:<12} {timeline}")
        else:
            lines.append(
                f"{name:<12} {timeline.seconds:>10.6g} {timeline.bubble:>8.2%} "
                f"{timeline.peak:>13.6g} {timeline.messages:>9,}"
            )
    return "\n".join(lines)


def as_json(found: Mapping[str, Timeline | str]) -> str:
    """Return the same as JSON: an object by schedule, in which "error" says why there is none."""
    told = {
        name: {"error": each}
        if isinstance(each, str)
        else {
            "time": each.seconds,
            "bubble": each.bubble,
            "kept": list(each.peaks),
            "messages": each.messages,
        }
        for name, each in found.items()
    }
    return json.dumps(told, indent=2)


def as_svg(timeline: Timeline) -> str:
    """Draw a schedule: a row for each rank, time to the right."""
    scale = _WIDTH / timeline.seconds if timeline.seconds else 0.0
    height = _TOP + _ROW * len(timeline.spans) + 10
    title = f"{timeline.schedule.name}: time {timeline.seconds:g}, bubble {timeline.bubble:.1%}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 10}" height="{height}" '
        'font-family="sans-serif" font-size="10">',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" fill="white"/><text x="{_LEFT}" y="18">{escape(title)}; '
        + _legend(timeline)
        + "</text>",
    ]
    for rank, row in enumerate(timeline.spans):
        y = _TOP + rank * _ROW
        parts.append(f'<text x="4" y="{y + 14}">rank {rank}</text>')
        for action, start, end in row:
            x, width = _LEFT + start * scale, (end - start) * scale
            later = action.stage >= len(timeline.spans)
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 3}" '
                f'fill="{_COLORS[action.kind]}" stroke="{"#333" if later else "#fff"}" '
                f'stroke-width="0.6"><title>{action} {start:g} to {end:g}</title></rect>'
            )
            if width >= _LEAST_FOR_TEXT:
                parts.append(
                    f'<text x="{x + width / 2:.2f}" y="{y + 13}" text-anchor="middle">'
                    f"{action.microbatch}</text>"
                )
    return "\n".join([*parts, "</svg>"])


def _legend(timeline: Timeline) -> str:
    """What colours and frames mean, of the kinds that are there."""
    there = {action.kind for row in timeline.spans for action, _, _ in row}
    words = [
        f'<tspan fill="{_COLORS[kind]}" font-weight="bold">&#9632;</tspan> {escape(text)}'
        for kind, text in KINDS.items()
        if kind in there
    ]
    if timeline.schedule.stages > len(timeline.spans):
        words.append("dark frame: a later stage of the rank")
    return ", ".join(words)


def as_trace(timeline: Timeline, *, unit: float = 1e6) -> str:
    """Return the trace event format that Perfetto and Chrome read, a track for each rank.

    Args:
        timeline: the schedule in time.
        unit: microseconds in one unit of the stages' times.
    """
    events = [
        {
            "name": f"{KINDS[action.kind]} {action}",
            "cat": action.kind,
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "ts": start * unit,
            "dur": (end - start) * unit,
        }
        for rank, row in enumerate(timeline.spans)
        for action, start, end in row
    ]
    return json.dumps({"traceEvents": events})
