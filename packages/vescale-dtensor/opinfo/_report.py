"""What a sweep found, as a summary of a few lines and as the table of the docs."""

from __future__ import annotations

from collections import Counter
from typing import Any

KINDS = ("sharded", "mixed", "two axes")


def support(verdict: dict[str, Any]) -> str:
    """`native`, `partly` or `fallback`: how much of an entry ran without replicating operands."""
    counts = verdict["native"].values()
    native, total = sum(c[0] for c in counts), sum(c[1] for c in counts)
    if native == total:
        return "native"
    return "partly" if native else "fallback"


def _statuses(report: dict[str, Any], library: str) -> Counter[str]:
    return Counter(e[library]["status"] for e in report["entries"].values() if library in e)


def summary(report: dict[str, Any]) -> str:
    """A few lines."""
    lines = []
    for library in ("vescale", "stock"):
        counts = _statuses(report, library)
        if counts:
            words = ", ".join(f"{count} {status}" for status, count in counts.most_common())
            lines.append(f"{library}: {counts.total()} entries: {words}")
    ours = [e["vescale"] for e in report["entries"].values()]
    ran = [v for v in ours if v["status"] == "passed"]
    kinds = Counter(support(v) for v in ran)
    if ran:
        shares = ", ".join(f"{kinds[k]} {k}" for k in ("native", "partly", "fallback"))
        lines.append(
            f"of {len(ran)} that passed: {shares} ({kinds['native'] / len(ran):.0%} native)"
        )
    return "\n".join(lines)


def markdown(report: dict[str, Any]) -> str:
    return summary(report)
