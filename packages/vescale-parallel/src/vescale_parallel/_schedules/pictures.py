"""Schedules as pictures: SVG, and letters for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from vescale_parallel._schedules.actions import KINDS
from vescale_parallel._schedules.timeline import Timeline

# One shade for each kind; actions of later chunks of a rank have a dark frame.
_COLORS: Final = {"F": "#7aa6da", "B": "#7cc48a", "I": "#9ad6a5", "W": "#d9b36c"}
_ROW, _LEFT, _TOP, _WIDTH = 22, 70, 30, 1400
# A shape that is narrower than its letters has none.
_LEAST_FOR_TEXT: Final = 14
# Beyond, nobody scrolls so far: numbers are left out.
_MOST: Final = 12_000


def as_svg(timelines: Timeline | Sequence[Timeline]) -> str:
    """Draw schedules: a row for each rank, time to the right.

    Args:
        timelines: one, or several, which are drawn one below the other to one scale.
    """
    every = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    longest = max((one.seconds for one in every), default=0.0)
    width = _width_of(every, longest)
    scale = width / longest if longest else 0.0
    parts: list[str] = []
    height = 0
    for one in every:
        parts += _drawn(one, height, scale)
        height += _TOP + _ROW * len(one.spans) + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + width + 10:.0f}" '
            f'height="{height}" font-family="sans-serif" font-size="10">',
            f"<title>{escape('; '.join(map(_title, every)))}</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            *parts,
            "</svg>",
        ]
    )


def _width_of(timelines: Sequence[Timeline], longest: float) -> float:
    """How wide a picture is, so that numbers of microbatches fit in the shortest actions."""
    shortest = min(map(_shortest, timelines), default=0.0)
    # A hundredth more: rounded down, the shortest action would lose its number.
    wanted = longest / shortest * _LEAST_FOR_TEXT * 1.01 if shortest else 0.0
    return _WIDTH if wanted > _MOST else max(_WIDTH, wanted)


def _shortest(timeline: Timeline) -> float:
    """How long the shortest action takes that takes any time."""
    rows = zip(timeline.starts, timeline.ends, strict=True)
    lengths = (end - start for row in rows for start, end in zip(*row, strict=True))
    return min((length for length in lengths if length > 0), default=0.0)


def _title(timeline: Timeline) -> str:
    return f"{timeline.schedule.name}: time {timeline.seconds:g}, bubble {timeline.bubble:.1%}"


def _drawn(timeline: Timeline, top: int, scale: float) -> list[str]:
    title = f"{escape(_title(timeline))}; {_legend(timeline)}"
    parts = [f'<text x="{_LEFT}" y="{top + 18}">{title}</text>']
    later = _later(timeline)
    for rank, row in enumerate(timeline.spans):
        y = top + _TOP + rank * _ROW
        parts.append(f'<text x="4" y="{y + 14}">rank {rank}</text>')
        for action, start, end in row:
            x, width = _LEFT + start * scale, (end - start) * scale
            frame = "#333" if action.stage in later else "#fff"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 3}" '
                f'fill="{_COLORS[action.kind]}" stroke="{frame}" '
                f'stroke-width="0.6"><title>{action} {start:g} to {end:g}</title></rect>'
            )
            if width >= _LEAST_FOR_TEXT:
                parts.append(
                    f'<text x="{x + width / 2:.2f}" y="{y + 13}" text-anchor="middle">'
                    f"{action.microbatch}</text>"
                )
    return parts


def _later(timeline: Timeline) -> frozenset[int]:
    """Stages that are not the first of their rank."""
    # Where a rank has several, which ones is up to the schedule: a user's may have neighbours.
    places = timeline.schedule.stage_ranks
    return frozenset(s for s, rank in enumerate(places) if places.index(rank) < s)


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


def as_text(timeline: Timeline, width: int = 100) -> str:
    """Draw a schedule in letters: a line for each rank, time to the right.

    A letter tells what runs in the middle of its part of the time: F, B, I or W as in actions,
    small letters for later chunks of the rank, a dot where it waits. It stands for the shortest
    action where that fits, else for as much as makes the picture fit: actions are left out then.

    Args:
        timeline: the schedule in time.
        width: of the lines at most, in letters.
    """
    labels = [f"rank {rank}" for rank in range(len(timeline.ends))]
    margin = max(map(len, labels)) + 1
    room, shortest = max(width - margin, 1), _shortest(timeline)
    columns = min(round(timeline.seconds / shortest), room) if shortest else room
    lines = [_title(timeline)]
    if shortest and columns * shortest < timeline.seconds - shortest / 2:
        lines[0] += f", a letter for {timeline.seconds / columns:.3g}"
    later = _later(timeline)
    for label, row in zip(labels, timeline.spans, strict=True):
        letters = ["."] * columns
        at = 0
        for column in range(columns):
            now = (column + 0.5) * timeline.seconds / columns
            while at < len(row) and row[at].end <= now:
                at += 1
            if at < len(row) and row[at].start <= now:
                action = row[at].action
                kind = action.kind
                letters[column] = kind.lower() if action.stage in later else kind
        lines.append(f"{label:<{margin}}{''.join(letters)}")
    return "\n".join(lines)


TEXT_LEGEND: Final = (
    ", ".join(f"{letter} {words}" for letter, words in KINDS.items())
    + ", small letters: later stages of a rank, dots: it waits"
)
"""What the letters of `as_text` mean."""
