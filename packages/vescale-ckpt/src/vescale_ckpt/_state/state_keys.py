"""Names of leaves in a state, as strings: unique, readable, and distinct for keys 1 and "1"."""

import re

_LOOKS_LIKE_INT = re.compile(r"-?\d+")


def child(parent: str, key: str | int, *, top: bool = False) -> str:
    """Name the entry `key` of the container called `parent` (of the state itself: `top`).

    `optim/state/0/exp_avg`. In a string key "~" and "/" are written "~0" and "~1", and a string
    that looks like an integer gets "~s" in front, so that no two leaves share a name.
    """
    step = str(key) if isinstance(key, int) else _escape(key)
    return step if top else f"{parent}/{step}"


def of_rank(parent: str, rank: int) -> str:
    """Name what one rank keeps for itself under `parent`."""
    return f"{parent}/~r{rank}"


def _escape(key: str) -> str:
    if _LOOKS_LIKE_INT.fullmatch(key):
        return f"~s{key}"
    return key.replace("~", "~0").replace("/", "~1")
