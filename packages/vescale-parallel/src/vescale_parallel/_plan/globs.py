"""Reduces a layout for each name to the few rules that a person would have written."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from vescale_parallel._notation.glob import first_match, matches

REST: Final = "*"


def rules_of(layouts: Mapping[str, str], rest: str | None) -> dict[str, str]:
    """Return rules of which the first that matches gives each name its layout.

    Args:
        layouts: name to text.
        rest: the text that most names have, for which one rule at the end is enough; with None,
            names whose text is empty are matched by no rule.
    """
    plain = rest if rest is not None else ""
    wanted = {name: text for name, text in layouts.items() if text != plain}
    rules: dict[str, str] = {}
    for glob, text in _grouped(wanted):
        # Of a parameter its layer is told too: weights are everywhere.
        rules[_shortest(glob, text, layouts, 1 if rest is None else 2)] = text
    rules = _merged(rules, layouts)
    if rest is not None:
        rules[REST] = rest
    return _exact_first(rules, layouts, plain)


def _generic(name: str) -> str:
    """Return the name with its indices left open."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _grouped(wanted: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return globs for names that differ in their indices only."""
    found: dict[tuple[str, str], None] = {}
    for name, text in wanted.items():
        found[_generic(name), text] = None
    return list(found)


def _shortest(glob: str, text: str, layouts: Mapping[str, str], least: int) -> str:
    """Return the glob with as many leading parts left out as the layouts permit, `least` kept."""
    parts = glob.split(".")
    # What is there once is told by its whole name, so that a reader finds it.
    # From the shortest on: the first one that takes no name of another layout.
    for kept in range(least, 4) if "*" in parts else ():
        short = ".".join(["*", *parts[-kept:]])
        if len(parts) > kept and "*" not in parts[-kept:] and _all_have(short, text, layouts):
            return short
    return glob


def _all_have(glob: str, text: str, layouts: Mapping[str, str]) -> bool:
    return all(one == text for name, one in layouts.items() if matches(glob, name))


def _merged(rules: Mapping[str, str], layouts: Mapping[str, str]) -> dict[str, str]:
    """Return rules that differ in one part of their globs, written as one."""
    # The part before the last first: `{q,k}.weight` and `{q,k}.bias` then have heads that are
    # alike, and merge as well.
    return _merge_at(_merge_at(rules, 2), 1)


def _merge_at(rules: Mapping[str, str], place: int) -> dict[str, str]:
    """Return rules merged that differ in the part at that place, counted from the end, only."""
    alike: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for glob, text in rules.items():
        parts = glob.split(".")
        at = max(len(parts) - place, 0)
        key = ".".join(parts[:at]), ".".join(parts[at + 1 :]), text
        alike[key].append(parts[at])
    merged = {}
    for (before, after, text), own in alike.items():
        merged[".".join(part for part in (before, braces(own), after) if part)] = text
    return merged


def braces(words: Sequence[str]) -> str:
    """Return one glob for some words: `{q,k,v}_proj`."""
    if len(words) == 1:
        return words[0]
    # Words that hold braces already are nested as they are; a common end could cut through them.
    end = "" if any("{" in word for word in words) else _common_end(words)
    heads = [word.removesuffix(end) for word in words]
    return "{" + ",".join(heads) + "}" + end


def _common_end(words: Sequence[str]) -> str:
    """Return what all words end with after one of their underscores: `_proj`; else nothing."""
    ends = ["_" + word.partition("_")[2] for word in words if "_" in word]
    return ends[0] if len(ends) == len(words) and len(set(ends)) == 1 else ""


def _exact_first(
    rules: Mapping[str, str], layouts: Mapping[str, str], plain: str
) -> dict[str, str]:
    """Put exact rules for names that the others get wrong first, and leave out idle ones."""
    # Merged globs may reach further than the names that they were made of; those names get rules of
    # their own, in front.
    wrong = {
        name: text
        for name, text in layouts.items()
        if rules.get(first_match(rules, name) or "", "") != text
    }
    if plain == "" and any(text == "" for text in wrong.values()):
        # There is no rule that says nothing: write every name where a glob takes too many.
        return {name: text for name, text in layouts.items() if text}
    ordered = {**wrong, **rules}
    used = {first_match(ordered, name) for name in layouts} | {REST}
    return _alive({glob: text for glob, text in ordered.items() if glob in used}, layouts)


def _alive(rules: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    # The catch-all may be idle; every other rule has to match something.
    known = list(names)
    return {
        glob: text
        for glob, text in rules.items()
        if glob == REST or any(matches(glob, name) for name in known)
    }
