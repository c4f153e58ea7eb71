"""Rules merged with rules, and the spelling of the paper: placements by name or as objects."""

import re
from collections.abc import Mapping
from typing import Final

from vescale_parallel._errors import PlanError

REST: Final = "*"
_SHARD = re.compile(r"[Ss](?:hard)?\((?:dim=)?(-?\d+)\)")


def merged(first: Mapping[str, str], later: Mapping[str, str]) -> dict[str, str]:
    """Return rules of which the later ones win, with the rule for the rest at the end.

    Later rules come first, as the first that matches wins; where both have a glob, the later text
    stands, in the later place.
    """
    both = {**later, **{glob: text for glob, text in first.items() if glob not in later}}
    rest = both.pop(REST, None)
    return both if rest is None else {**both, REST: rest}


def layout_text(placement: object, axis: str) -> str:
    """Return a layout over one axis from a dim, or from a placement as torch prints it.

    Raises:
        PlanError: it is neither a dim, `Shard(dim)` nor `Replicate()`.
    """
    if isinstance(placement, int) and not isinstance(placement, bool):
        return f"{axis}:{placement}"
    # By what it prints: torch's placements print as ours do.
    text = str(placement).strip()
    found = _SHARD.fullmatch(text)
    if found is not None:
        return f"{axis}:{found[1]}"
    if re.fullmatch(r"R|[Rr]eplicate(\(\))?", text):
        return f"{axis}:full"
    raise PlanError(
        f"placement {placement!r}: expected a dim (as 0), Shard(dim) or Replicate(). Partial sums "
        "are what operators make of shards; nobody places them."
    )


def point_rule(point: str, layout: str) -> tuple[str, str]:
    """Return the rule for a point: `"*.mlp:in"`, `"*.mlp:out"`, or a module for its outputs.

    Raises:
        PlanError: the end of the point is neither.
    """
    module, _, side = point.partition(":")
    if side == "in":
        return module, f"{layout} ->"
    if side in ("out", ""):
        return module, f"-> {layout}"
    raise PlanError(f"point {point!r}: write 'module:in' or 'module:out', found ':{side}'.")


def join_sides(known: str | None, added: str) -> str:
    """Return two rules about one module: each side as the later says, else as the earlier does."""
    sides = [[side.strip() for side in text.split("->")] for text in (known or "->", added)]
    enter, leave = (later or earlier for earlier, later in zip(*sides, strict=True))
    return f"{enter} -> {leave}".strip()
