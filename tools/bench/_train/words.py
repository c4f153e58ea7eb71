"""Writes what was found beside ratios as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from tools.bench._train.profiling import Line, Profile
from tools.bench._train.ranks import RankResult

LONGEST = 12
"""Lines of a profile; what is left is one line more."""


def spread_table(found: Sequence[dict[str, RankResult]]) -> str:
    """Times with their spread, the parts of the peak, and what was sent."""
    lines = [
        f"  {'':24s} {'ms/step':>8s} {'quartiles':>15s} "
        f"{'param.':>8s} {'grad.':>8s} {'states':>8s} {'rest':>8s} {'peak MB':>8s}  collectives"
    ]
    for name, one in found[0].items():
        low, _, high = statistics.quantiles([1e3 * s for s in one.seconds] * 2, n=4)
        peak = max((each[name].peak for each in found), key=lambda p: p.total)
        parts = (peak.parameters, peak.gradients, peak.states, peak.rest, peak.total)
        sent = ", ".join(f"{n} {kind}" for kind, n in sorted(one.collectives.items()))
        lines.append(
            f"  {name:24s} {1e3 * one.median:8.2f} {low:7.2f}-{high:7.2f} "
            + " ".join(f"{part / 1e6:8.2f}" for part in parts)
            + f"  {sent or 'none'}"
        )
    lines += _floors(found[0])
    return "\n".join(lines)


def _floors(found: dict[str, RankResult]) -> Iterator[str]:
    """What a step is made of, timed by itself in the same turns."""
    for name, one in found.items():
        if one.parts:
            parts = [f"{1e3 * statistics.median(s):.2f} ms {part}" for part, s in one.parts.items()]
            share = one.median / one.floor
            floor = f"{' + '.join(parts)} = {1e3 * one.floor:.2f} ms"
            yield f"  floor of {name}: {floor}; the step takes {share:.2f} of it"


def profile_table(found: dict[str, RankResult]) -> Iterator[str]:
    """A table for each variant that was profiled."""
    for name, one in found.items():
        if one.profile is not None:
            yield "\n".join(_profile(name, one.profile))


def _profile(name: str, profile: Profile) -> Iterator[str]:
    whole = profile.milliseconds
    yield f"  {name}: {whole:.2f} ms a step on rank 0, profiled"
    groups = (
        ("local ops", profile.ops),
        ("collectives", profile.collectives),
    )
    for title, lines in groups:
        total = sum(line.milliseconds for line in lines)
        yield f"    {total:8.2f} ms {_share(total, whole)}  {title}"
        yield from _longest(lines, whole)
    yield f"    {profile.between:8.2f} ms {_share(profile.between, whole)}  between them (Python)"
    yield f"    {profile.calls:8.0f} calls of Python and C functions"


def _longest(lines: Iterable[Line], whole: float) -> Iterator[str]:
    """The first ones, and the sum of the others."""
    ordered = list(lines)
    rest = ordered[LONGEST:]
    if rest:
        count, total = sum(one.count for one in rest), sum(one.milliseconds for one in rest)
        ordered = [*ordered[:LONGEST], Line(f"{len(rest)} others", count, total)]
    for one in ordered:
        share = _share(one.milliseconds, whole)
        yield f"      {one.milliseconds:8.2f} ms {share} {one.count:7.1f} x {one.name}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:6.1%}"
