"""Schedules as tables and traces."""

from __future__ import annotations

import json
from collections.abc import Mapping

from vescale_parallel._schedules.actions import KINDS
from vescale_parallel._schedules.timeline import Timeline


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
