"""Parses what a plan says about experts, before there is a model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vescale_parallel._errors import PlanError
from vescale_parallel._notation.glob import expand_braces

_AXIS = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True)
class ExpertRules:
    """What a plan says, parsed; at most one of the two.

    Attributes:
        axes: axes over which the experts of every module that is known to hold some are sharded.
        globs: glob over module names to such axes; the first match wins.
    """

    axes: tuple[str, ...] = ()
    globs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_used(self) -> bool:
        """Whether the plan says anything about experts."""
        return bool(self.axes or self.globs)


def parse_experts(said: Any) -> ExpertRules:
    """Read what a plan says: `"ep"`, `"dp, ep"`, or a mapping of globs to such words.

    Raises:
        PlanError: anything else; the message quotes it.
    """
    if said is None:
        return ExpertRules()
    if not isinstance(said, Mapping):
        return ExpertRules(axes=_axes(said))
    if not said:
        raise PlanError("plan experts: an empty mapping says nothing; leave it out.")
    for glob in said:
        if not isinstance(glob, str):
            raise PlanError(f"plan experts: a glob is a string, got {glob!r}.")
        expand_braces(glob)
    return ExpertRules(globs={glob: _axes(text) for glob, text in said.items()})


def _axes(text: Any) -> tuple[str, ...]:
    names = [part.strip() for part in text.split(",")] if isinstance(text, str) else []
    wrong = [name for name in names if _AXIS.fullmatch(name) is None]
    if not names or wrong or len(set(names)) < len(names):
        raise PlanError(
            f"plan experts: {text!r} cannot be read. Write the axis that the experts are sharded "
            "over, as 'ep', or several, as 'dp, ep'; or globs over module names to that."
        )
    return tuple(names)
