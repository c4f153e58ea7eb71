"""Collects what a training benchmark found beside ratios, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tools.bench._train.ranks import Job, RankResult
from tools.bench._train.words import profile_table, spread_table


class Details:
    """Kept from `measure` for `details` of the same benchmark."""

    def __init__(self) -> None:
        self._cases: dict[str, tuple[str, dict[str, Any]]] = {}

    def clear(self) -> None:
        """Forget an earlier run."""
        self._cases.clear()

    def note(self, job: Job, found: Sequence[dict[str, RankResult]]) -> str:
        """Keep what the ranks found; returns the name of the case."""
        case = f"{job.layout} {job.sizes.hidden}"
        text = "\n\n".join([spread_table(found), *profile_table(found[0])])
        ranks = [{name: asdict(one) for name, one in each.items()} for each in found]
        self._cases[case] = text, {"job": asdict(job), "ranks": ranks}
        return case

    def told(self) -> tuple[str, dict[str, Any]]:
        """Return it as text for people, and as data."""
        text = "\n\n".join(f"{case}\n{found}" for case, (found, _) in self._cases.items())
        return text, {case: data for case, (_, data) in self._cases.items()}
