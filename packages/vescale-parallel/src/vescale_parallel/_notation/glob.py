"""Globs over dotted names: `*`, `?`, `[ab]` and `{q,k,v}`, of which `{q,~v}` need not match.

`*` crosses dots: `*.weight` matches `layers.0.mlp.up.weight`. A plan addresses names at any depth,
and a star that stops at dots would force one rule for each depth.
"""

import functools
import re
from collections.abc import Iterable
from fnmatch import translate

from vescale_parallel._common.messages import nearest
from vescale_parallel._errors import PlanError

# Takes every name that no rule before it takes.
CATCH_ALL = "*"
# Beyond, it is a typing error, or somebody's who wants the memory.
_MOST_ALTERNATIVES = 4096
_MOST_BRACES = 64
# Begins an alternative that need not match anything, so that one plan serves several adapters.
_OPTIONAL = "~"


def expand_braces(glob: str) -> tuple[str, ...]:
    """Return all alternatives of a glob: `a{b,c}` is `ab` and `ac`; braces may nest."""
    return tuple(alternative for alternative, _ in _all_alternatives(glob))


def _all_alternatives(glob: str) -> tuple[tuple[str, bool], ...]:
    # Each takes a level of the stack.
    if glob.count("{") > _MOST_BRACES:
        raise PlanError(
            f"glob {glob[:80]!r}: more than {_MOST_BRACES} braces. Write several rules."
        )
    return _alternatives(glob)


@functools.lru_cache(maxsize=4096)
def _alternatives(glob: str) -> tuple[tuple[str, bool], ...]:
    """Return all alternatives of a glob, each with whether it need not match anything."""
    # Outermost braces first: what is inside them is expanded by the calls below.
    start = glob.find("{")
    if start < 0:
        if "}" in glob:
            raise PlanError(f"glob {glob!r}: '}}' without '{{'. Write alternatives as '{{q,k,v}}'.")
        return ((glob, False),)
    end = _closing_brace(glob, start)
    before, inside, after = glob[:start], glob[start + 1 : end], glob[end + 1 :]
    if "}" in before:
        raise PlanError(f"glob {glob!r}: '}}' without '{{'. Write alternatives as '{{q,k,v}}'.")
    # Choices may hold braces themselves; what follows is expanded once for all of them.
    heads = [
        (before + part, may_miss or choice.startswith(_OPTIONAL))
        for choice in _split(inside)
        for part, may_miss in _alternatives(choice.removeprefix(_OPTIONAL))
    ]
    tails = _alternatives(after)
    if len(heads) * len(tails) > _MOST_ALTERNATIVES:
        raise PlanError(
            f"glob {glob[:80]!r}: more than {_MOST_ALTERNATIVES} alternatives. Write several rules."
        )
    return tuple((head + tail, one or other) for head, one in heads for tail, other in tails)


def _closing_brace(glob: str, start: int) -> int:
    depth = 0
    for position in range(start, len(glob)):
        depth += {"{": 1, "}": -1}.get(glob[position], 0)
        if depth == 0:
            return position
    raise PlanError(f"glob {glob!r}: the '{{' at position {start} is never closed.")


def _split(inside: str) -> list[str]:
    """Split at the commas that are not inside inner braces."""
    parts, depth = [""], 0
    for character in inside:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


@functools.lru_cache(maxsize=4096)
def _regex(alternative: str) -> re.Pattern[str]:
    # `translate` anchors the end and `match` the beginning, so that complete names are compared.
    return re.compile(translate(alternative))


def matches(glob: str, name: str) -> bool:
    """Return whether any alternative of the glob matches the complete name."""
    return any(_regex(alternative).match(name) for alternative in expand_braces(glob))


def dead_alternatives(glob: str, names: Iterable[str]) -> list[str]:
    """Return the alternatives of a glob that match no name, but those that need not: `~v`."""
    # Read once for each alternative, which an iterator would not survive.
    known = list(names)
    return [
        alternative
        for alternative, may_miss in _all_alternatives(glob)
        if not may_miss and not any(_regex(alternative).match(name) for name in known)
    ]


def nearest_names(alternative: str, names: Iterable[str]) -> list[str]:
    """Return the names that an alternative that matches nothing may have meant, best first.

    Stars hide most of a name, so the literal part is compared with the ends of names that have as
    many dotted components.
    """
    # Also of names that a pattern with `?` or `[ab]` meant: those signs cost little similarity.
    literal = alternative.replace("*", "").strip(".")
    depth = literal.count(".") + 1
    by_end: dict[str, str] = {}
    for name in names:
        by_end.setdefault(".".join(name.split(".")[-depth:]), name)
    return [by_end[end] for end in nearest(literal, by_end)]


def named_matches(rules: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return the first match of each name of one tied parameter, where one matches.

    Names that only `*` takes follow those that a rule is written for: nobody names all of them.
    """
    globs = list(rules)
    found = {name: glob for name in names if (glob := first_match(globs, name)) is not None}
    written = {name: glob for name, glob in found.items() if glob != CATCH_ALL}
    return written or found


def first_match(rules: Iterable[str], name: str) -> str | None:
    """Return the first glob that matches a name, or None."""
    return next((glob for glob in rules if matches(glob, name)), None)
