"""What a plan says about ZeRO, read: levels by glob, the axis, units; before there is a model."""

import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from vescale_parallel._errors import PlanError
from vescale_parallel._glob import expand_braces

LEVELS: Final = {
    0: "nothing is sharded",
    1: "optimizer states",
    2: "optimizer states and gradients",
    3: "optimizer states, gradients and parameters",
}
"""What each level shards over the axis."""

_CATCH_ALL: Final = "*"


@dataclass(frozen=True)
class ZeroRules:
    """What a plan says about ZeRO, parsed.

    Attributes:
        levels: glob over parameter names to a level of `LEVELS`; the first match wins.
        over: the mesh axis that shards.
        units: globs over names of modules that are gathered as one; none: repeated blocks.
        prefetch: how many units are gathered ahead.
        compute: dtype of the gathered values; None: that of the stored parameters.
        reduce: dtype in which gradients are summed; None: that of the gathered values.
    """

    levels: Mapping[str, int]
    over: str
    units: tuple[str, ...]
    prefetch: int
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    @property
    def is_used(self) -> bool:
        """Whether anything is sharded at all."""
        return any(self.levels.values())


def parse_zero(zero: object, over: object, units: object, prefetch: object) -> ZeroRules:
    """Read what a plan says.

    Raises:
        PlanError: a level, axis or glob that is none; the message quotes it.
    """
    levels: dict[str, Any] = dict(zero) if isinstance(zero, Mapping) else {_CATCH_ALL: zero}
    for glob, level in levels.items():
        _check_level(glob, level)
    if not isinstance(over, str) or not over.isidentifier() or keyword.iskeyword(over):
        raise PlanError(f"plan over={over!r}: name one mesh axis, as over='dp'.")
    globs = (units,) if isinstance(units, str) else tuple(units or ())  # type: ignore[arg-type]
    for glob in globs:
        if not isinstance(glob, str):
            raise PlanError(f"plan units: a glob is a string, got {glob!r}.")
        expand_braces(glob)
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise PlanError(f"plan prefetch={prefetch!r}: a number of units, 0 or more.")
    return ZeroRules(levels, over, globs, prefetch)


def _check_level(glob: object, level: object) -> None:
    if not isinstance(glob, str):
        raise PlanError(f"plan zero: a glob is a string, got {glob!r}.")
    expand_braces(glob)
    if isinstance(level, bool) or not isinstance(level, int) or level not in LEVELS:
        said = ", ".join(f"{number}: {what}" for number, what in LEVELS.items())
        where = "" if glob == _CATCH_ALL else f" of '{glob}'"
        raise PlanError(
            f"plan zero{where}: there is no level {level!r}. Levels shard over one axis: {said}."
        )
