"""Writes REDISTRIBUTION.md: what every change of placement does, and how much it sends.

The planner is pure, so no process is started: `python benchmarks/redistribution_table.py`. That
the bytes are those on the wire is what `tests/test_redistribution_processes.py` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from pathlib import Path

from vescale_dtensor._mesh import Coordinate, coordinates
from vescale_dtensor._placements import (
    InterleavedShard,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
)
from vescale_dtensor._redistribution_boxes import Frame
from vescale_dtensor._redistribution_build import plan_steps
from vescale_dtensor._redistribution_meshes import plan_passage
from vescale_dtensor._redistribution_steps import Step

FILE = Path(__file__).parent.parent / "REDISTRIBUTION.md"
ITEMSIZE = 4
LINE: tuple[Placement, ...] = (
    Replicate(),
    Shard(0),
    Shard(1),
    InterleavedShard(0, 2),
    StridedShard(1, 2),
    RaggedShard((0,), (2, 0, 1, 1)),
    RaggedShard((0, 1), (3, 0, 2, 1)),
    Partial(),
    Partial("max"),
)
SQUARE: tuple[tuple[Placement, ...], ...] = (
    (Replicate(), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Replicate(), Shard(0)),
    (StridedShard(0, 2), Shard(0)),
    (Partial(), Partial()),
)

Plans = Callable[[Coordinate], tuple[Step, ...]]

HEAD = """# Redistribution

What changing a layout does. Each cell names the steps and the bytes that all four ranks send
together, of float32; a dash is a change that costs nothing, and a step without bytes is local.
Written by `benchmarks/redistribution_table.py`; a test checks that it is up to date.

- *slice*, *pad*, *local*, *mask*: this rank's own data cut, put into zeros, rearranged, or kept on
  one coordinate of the axis only.
- Nothing is padded on the wire: uneven and empty pieces are sent as they are.
"""


def text() -> str:
    """The whole file."""
    parts = [HEAD]
    for shape, what in [((8, 12), "even pieces"), ((4, 3), "uneven and empty pieces")]:
        parts.append(f"## A tensor {list(shape)} on a mesh (4): {what}\n")
        parts.append(_table(LINE, LINE, lambda a, b, s=shape: _within((4,), s, (a,), (b,))))
    parts.append("## A tensor [8, 12] from a mesh (4) to a mesh (2, 2) of the same ranks\n")
    parts.append(_table(LINE, SQUARE, lambda a, b: _across((4,), (2, 2), (8, 12), (a,), b)))
    parts.append("## A tensor [8, 12] from a mesh (2, 2) to a mesh (4) of the same ranks\n")
    parts.append(_table(SQUARE, LINE, lambda a, b: _across((2, 2), (4,), (8, 12), a, (b,))))
    return "\n".join(parts)


def _table(sources: Sequence[object], targets: Sequence[object], cell: Callable[..., str]) -> str:
    rows = [["from \\ to", *map(_name, targets)], ["---"] * (len(targets) + 1)]
    rows += [[_name(source), *(cell(source, target) for target in targets)] for source in sources]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _name(placements: object) -> str:
    return ", ".join(map(str, placements)) if isinstance(placements, tuple) else str(placements)


def _within(
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> str:
    return _cell(sizes, lambda at: plan_steps(source, target, Frame(sizes, shape, at, ITEMSIZE)))


def _across(
    sizes: tuple[int, ...],
    others: tuple[int, ...],
    shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> str:
    places = dict(zip(coordinates(sizes), coordinates(others), strict=True))
    return _cell(
        sizes,
        lambda at: (
            plan_passage(source, target, Frame(sizes, shape, at, ITEMSIZE), others, places).steps
        ),
    )


def _cell(sizes: tuple[int, ...], plans: Plans) -> str:
    """Steps of one kind are alike on all ranks that take them; the longest list names them all."""
    steps = [plans(at) for at in product(*map(range, sizes))]
    assert len(steps) == prod(sizes)
    longest = max(steps, key=len)
    sent = sum(step.wire_bytes for each in steps for step in each)
    words = " + ".join(_word(step) for step in longest) or "-"
    return f"{words}: {sent:,} B" if sent else words


def _word(step: Step) -> str:
    """What kind of step it is, whoever takes it."""
    name = type(step).__name__.removeprefix("Packed")
    return {
        "Rearrange": "pad" if step.title == "pad" else "local",
        "AllReduce": "all-reduce",
        "ReduceScatter": "reduce-scatter",
        "AllGather": "all-gather",
        "GatherPieces": "all-gather",
        "AllToAll": "all-to-all",
    }.get(name, name.lower())


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE.name}")
