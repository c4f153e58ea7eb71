"""Compares the logs of several runs: computed from them, nothing assumed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Events = Sequence[Mapping[str, Any]]

EARLY_STEPS: Final = 20
EARLY_BOUND: Final = 1e-5
"""Promised for the first 20 steps, where only the order of floating-point sums can differ."""

WHOLE_BOUND: Final = 1e-3
"""For the whole curve: training amplifies rounding differences, the more the larger the rate."""


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of two loss curves, and where it is."""

    relative: float
    step: int


@dataclass(frozen=True)
class Digests:
    """Digests of two runs, side by side.

    Attributes:
        equal: whether there are some and all agree.
        count: how many were compared.
        first: the first of the reference.
        differing: what they are of, where they differ.
    """

    equal: bool
    count: int
    first: str
    differing: tuple[str, ...]


def losses(events: Events) -> dict[int, float]:
    """Loss by step."""
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def largest_difference(one: Mapping[int, float], two: Mapping[int, float]) -> Difference:
    """Compare two curves over the steps that both have; there must be some."""
    shared = sorted(set(one) & set(two))
    return max(
        (Difference(abs(two[s] - one[s]) / abs(one[s]), s) for s in shared),
        key=lambda difference: difference.relative,
    )


def early(curve: Mapping[int, float]) -> dict[int, float]:
    """The steps that the tight promise is about."""
    return {step: loss for step, loss in curve.items() if step <= EARLY_STEPS}


def compare_digests(what: str, one: Events, two: Events) -> Digests:
    """Compare the digests of a kind (`parameters`, `dropout`), in the order they were taken."""
    left, right = (
        [(e.get("module", what), e["sha256"]) for e in events if e.get("what") == what]
        for events in (one, two)
    )
    differing = tuple(name for name, sha in left if (name, sha) not in right)
    # Equal means in order, too: the same masks in another sequence would be another run.
    return Digests(
        equal=bool(left) and left == right,
        count=len(left),
        first=left[0][1] if left else "none",
        differing=differing,
    )


def shown_steps(steps: Sequence[int], most: int = 16) -> list[int]:
    """Which rows a table shows: the first few, then evenly, and the last."""
    ordered = sorted(steps)
    if len(ordered) <= most:
        return ordered
    head = most // 3
    stride = -(-(len(ordered) - head) // (most - head - 1))
    return sorted({*ordered[:head], *ordered[head - 1 :: stride], ordered[-1]})


def loss_table(reference: Mapping[int, float], title: str, curve: Mapping[int, float]) -> str:
    """Step, loss on one device, loss of the other run, difference."""
    header = ["step", "loss on one device", f"loss on {title}", "difference"]
    rows = [
        (step, f"{reference[step]:.6f}", f"{curve[step]:.6f}", _signed(curve, reference, step))
        for step in shown_steps(list(curve))
    ]
    return right_aligned([header, *rows])


def difference_table(
    reference: Mapping[int, float], curves: Mapping[str, Mapping[int, float]]
) -> str:
    """Step, loss on one device, and how much each other run differs from it."""
    header = ["step", "loss on one device", *curves]
    shared = set.intersection(*(set(curve) for curve in curves.values()))
    rows = [
        (step, f"{reference[step]:.6f}", *(_signed(c, reference, step) for c in curves.values()))
        for step in shown_steps(list(shared), most=10)
    ]
    return right_aligned([header, *rows])


def memory_table(runs: Mapping[str, Events]) -> str:
    """What the ranks of each run hold between steps, in MB: of the rank with most, then of all."""
    kinds = ("parameters", "gradients", "states")
    rows: list[Sequence[object]] = [["run", *kinds, "MB on each rank"]]
    for title, events in runs.items():
        told: list[Any] = [one["ranks"] for one in events if one["event"] == "memory"]
        ranks: list[dict[str, int]] = told[-1] if told else []
        most = [max((rank[kind] for rank in ranks), default=0) for kind in kinds]
        each = " ".join(f"{sum(rank.values()) / 1e6:.2f}" for rank in ranks)
        rows.append([title, *(f"{one / 1e6:.2f}" for one in most), each])
    return right_aligned(rows)


def _signed(curve: Mapping[int, float], reference: Mapping[int, float], step: int) -> str:
    return f"{curve[step] - reference[step]:+.1e}"


def right_aligned(rows: Sequence[Sequence[object]]) -> str:
    """Rows as aligned columns of text, the first of them underlined as the header."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
