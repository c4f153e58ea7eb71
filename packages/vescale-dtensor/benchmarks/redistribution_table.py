"""Writes REDISTRIBUTION.md: what every change of placement does, and how much it sends.

The planner is pure, so no process is started: `python benchmarks/redistribution_table.py`. That
the bytes are those on the wire is what `tests/redistribute/test_processes.py` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import inf, prod
from pathlib import Path
from random import Random

from redistribution_bound import fewest_elements
from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.mesh import Coordinate, coordinates
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import (
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
)
from vescale_dtensor._layout.shard_geometry import check_fits
from vescale_dtensor._redistribute.cross_mesh import plan_cross_mesh
from vescale_dtensor._redistribute.lower import plan_steps
from vescale_dtensor._redistribute.ownership import PlanContext
from vescale_dtensor._redistribute.steps import Step

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
    Partial("avg"),
    Partial("max"),
)
ALL_KINDS = (*LINE, Partial("min"), Partial("prod"), Partial("norm2"))
CORE: tuple[Placement, ...] = (Replicate(), Partial(), Shard(0), Shard(1))
SQUARE: tuple[tuple[Placement, ...], ...] = (
    (Replicate(), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Replicate(), Shard(0)),
    (StridedShard(0, 2), Shard(0)),
    (Partial(), Partial()),
)
MIXED: tuple[tuple[Placement, ...], ...] = (
    *SQUARE[:4],
    (Shard(1), Shard(0)),
    (Partial(), Replicate()),
    (Partial(), Shard(0)),
    (Shard(0), Partial()),
    (Partial(), Partial()),
    (InterleavedShard(0, 2), Shard(1)),
    (Partial("max"), Shard(0)),
)
# Mesh, shape, placements of an axis, and how many pairs are looked at.
COMPARED: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...], int], ...] = (
    ((4,), (8, 12), ALL_KINDS, 1000),
    ((4,), (4, 3), ALL_KINDS, 1000),
    ((2, 2), (8, 8), CORE, 1000),
    ((2, 2), (5, 3), CORE, 1000),
    ((2, 2), (8, 8), (*CORE, InterleavedShard(0, 2), StridedShard(1, 2), Partial("max")), 400),
    ((2, 2, 2), (8, 8), CORE, 200),
)

Plans = Callable[[Coordinate], tuple[Step, ...]]

HEAD = """# Redistribution

What changing a layout does. Each cell names the steps and the bytes that all four ranks send
together, of float32; a dash is a change that costs nothing, and a step without bytes is local.
Written by `benchmarks/redistribution_table.py`; a test checks that it is up to date.

- *slice*, *pad*, *local*, *mask*: this rank's own data sliced, padded with zeros, rearranged, or
  kept on one coordinate of the axis only.
- Nothing is padded on the wire: uneven and empty shards are sent as they are.
- `x1.5` behind a cell: the fewest bytes that any schedule could send, by the counting argument of
  `benchmarks/redistribution_bound.py`, times 1.5. Cells without it send no more than these.
"""

ABOVE = """## How far from the fewest bytes

All pairs of layouts of a mesh whose axes have these placements, or as many as are named, drawn with
a seed. A pair is above the bound

- where reductions of two kinds are nested, as a maximum of sums: the bound lets partial values
  of both be sent as one, which no schedule can;
- where a reduction ends or begins with one dim sharded on two axes, and one of these shardings is
  interleaved, strided, ragged or inside of one that stays: a rank that gets a sum then is not
  always one that needs it;
- where several dims are sharded as one on one axis and another axis becomes partial: a shard of one
  dim cannot be inside of such a sharding, so that the other axis is gathered;
- where an average meets a product, neither of which may be multiplied out of the other;
- where a sharding is uneven: plans are compared by what they send for even ones.

"""


def text() -> str:
    """The whole file."""
    parts = [HEAD]
    for shape, what in [((8, 12), "even shards"), ((4, 3), "uneven and empty shards")]:
        parts.append(f"## A tensor {list(shape)} on a mesh (4): {what}\n")
        parts.append(_table(LINE, LINE, lambda a, b, s=shape: _within((4,), s, (a,), (b,))))
    parts.append("## A tensor [8, 12] from a mesh (4) to a mesh (2, 2) of the same ranks\n")
    parts.append(_table(LINE, SQUARE, lambda a, b: _across((4,), (2, 2), (8, 12), (a,), b)))
    parts.append("## A tensor [8, 12] from a mesh (2, 2) to a mesh (4) of the same ranks\n")
    parts.append(_table(SQUARE, LINE, lambda a, b: _across((2, 2), (4,), (8, 12), a, (b,))))
    parts.append("## A tensor [8, 12] on a mesh (2, 2)\n")
    parts.append(_table(MIXED, MIXED, lambda a, b: _within((2, 2), (8, 12), a, b)))
    parts.append(ABOVE + "".join(_comparisons()))
    return "\n".join(parts)


def _comparisons() -> list[str]:
    rows = [
        "| mesh | shape | placements | pairs | at the bound | worst |\n| --- "
        + "| --- " * 5
        + "|\n"
    ]
    for sizes, shape, placements, most in COMPARED:
        fit = [p for p in product(placements, repeat=len(sizes)) if _fits(p, sizes, shape)]
        pairs = list(product(fit, fit))
        if len(pairs) > most:
            pairs = Random(0).sample(pairs, most)
        ratios = [_ratio(sizes, shape, a, b, _sent(sizes, shape, a, b)) for a, b in pairs]
        least = sum(ratio <= 1 for ratio in ratios)
        named = ", ".join(map(str, placements))
        cells = (sizes, list(shape), named, len(pairs), least, _times(max(ratios)))
        rows.append(f"| {' | '.join(map(str, cells))} |\n")
    return rows


def _fits(
    placements: tuple[Placement, ...], sizes: tuple[int, ...], shape: tuple[int, ...]
) -> bool:
    try:
        check_fits(placements, sizes, shape)
    except LayoutError:
        return False
    return True


def _sent(
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
) -> int:
    frames = (PlanContext(sizes, shape, at, ITEMSIZE) for at in coordinates(sizes))
    return sum(step.wire_bytes for f in frames for step in plan_steps(source, target, f))


def _ratio(
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    sent: int,
) -> float:
    """What is sent over what has to be; infinite where nothing has to be."""
    least = ITEMSIZE * fewest_elements(source, target, sizes, shape)
    assert sent >= least - ITEMSIZE * len(sizes), (source, target)  # bytes of a rank are whole
    return sent / least if least else (inf if sent else 1.0)


def _times(ratio: float) -> str:
    return "more than nothing" if ratio == inf else f"x{ratio:.3g}"


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
    sent = _sent(sizes, shape, source, target)
    ratio = _ratio(sizes, shape, source, target, sent)
    cell = _cell(
        sizes, lambda at: plan_steps(source, target, PlanContext(sizes, shape, at, ITEMSIZE))
    )
    return cell if ratio < 1.005 else f"{cell} {_times(ratio)}"


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
            plan_cross_mesh(
                source, target, PlanContext(sizes, shape, at, ITEMSIZE), others, places
            ).steps
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
        "Scale": "scale",
        "AllToAll": "all-to-all",
    }.get(name, name.lower())


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE.name}")
