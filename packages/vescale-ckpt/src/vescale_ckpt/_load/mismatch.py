"""Words the error for a checkpoint that does not fit the state: which keys, which shapes."""

import difflib
from typing import Any, NamedTuple

# Lines of a list in the message, and names among which similar ones are looked for: comparing every
# name with every other takes long in a large model.
_LIMIT = 8
_CANDIDATES = 2000


class Differences(NamedTuple):
    """How a checkpoint and the state that it is loaded into differ; complete lists.

    `missing` names what only `into` has, `unexpected` what only the checkpoint has; `different`
    holds a sentence for each difference.
    """

    missing: list[str]
    unexpected: list[str]
    different: list[str]


def differences(answers: list[dict[str, Any]], *, strict: bool) -> Differences:
    """Collect what does not fit, over all ranks. The same on every rank."""
    return Differences(
        _union([answer["missing"] for answer in answers]) if strict else [],
        # What one rank does not ask for, another may: unexpected is what no rank asks for.
        _common([answer["unexpected"] for answer in answers]) if strict else [],
        _union([answer["clashes"] for answer in answers]),
    )


def mismatch_message(path: str, lists: Differences, empty_dicts: list[list[str]]) -> str:
    """Write the message for people: the beginning of every list."""
    missing, unexpected, different = lists
    parts = [f"the checkpoint {path} does not fit the state it is loaded into"]
    parts += _section("different", different, len(different))
    nearest = [_with_nearest(name, unexpected) for name in missing[:_LIMIT]]
    parts += _section("missing from the checkpoint", nearest, len(missing))
    parts += _section("only in the checkpoint", [f"'{n}'" for n in unexpected], len(unexpected))
    parts += _advice(_union(empty_dicts), unexpected)
    return "\n".join(parts)


def _section(title: str, lines: list[str], count: int) -> list[str]:
    if not count:
        return []
    more = [f"    and {count - _LIMIT} more"] if count > _LIMIT else []
    return [f"  {title} ({count}):", *(f"    {line}" for line in lines[:_LIMIT]), *more]


def _with_nearest(name: str, others: list[str]) -> str:
    near = difflib.get_close_matches(name, others[:_CANDIDATES], n=1)
    return f"'{name}' (nearest there: '{near[0]}')" if near else f"'{name}'"


def _advice(empty_dicts: list[str], unexpected: list[str]) -> list[str]:
    inside = [d for d in empty_dicts if any(n.startswith(f"{d}/") or not d for n in unexpected)]
    if not inside:
        return []
    return [
        f"  `into` holds an empty dict at '{inside[0]}'. An optimizer has no state before its",
        "  first step: call init_optimizer_state(optimizer) before its state_dict(), or put",
        "  WHOLE there to get full tensors",
    ]


def _union(lists: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _common(lists: list[list[str]]) -> list[str]:
    rest = [set(names) for names in lists[1:]]
    return [name for name in lists[0] if all(name in names for names in rest)]
