"""Reads and resolves what a plan says about memory of the host. Pure.

What lies there is always what an optimizer steps: the stored parameters, their gradients and their
states, as a step computes where its states are. The words differ in what the device keeps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from vescale_parallel._common.messages import did_you_mean, human_bytes, listed, table
from vescale_parallel._errors import PlanError
from vescale_parallel._notation.glob import expand_braces, named_matches
from vescale_parallel._notation.rows import ParameterRow

OPTIMIZER: Final = "optimizer"
"""The device keeps values in the compute dtype, and copies them from the host after each step."""

PARAMETERS: Final = "parameters"
"""The device keeps nothing between uses: each gather first copies this rank's shard to it."""

_ALL: Final = "all"
_NONE: Final = "none"
_WORDS: Final = {_NONE: "", True: _ALL, OPTIMIZER: OPTIMIZER, PARAMETERS: PARAMETERS}
_HINT: Final = (
    "Write offload=True (all that zero shards), 'optimizer' (the device keeps the values that it "
    "computes with), 'parameters' (it keeps none between uses), or such words by glob, as in "
    "{'embed*': 'none', '*': True}."
)


class OffloadRules(Protocol):
    """What of a plan's rules matters here."""

    @property
    def offload(self) -> Mapping[str, str]: ...
    @property
    def over(self) -> str: ...


def spelled_offload(value: Any) -> Any:
    """Return what a user wrote, with words in place of False, which TOML has for None."""
    if isinstance(value, Mapping):
        return {glob: _NONE if word is False else word for glob, word in value.items()}
    return None if value is False else value


def parse_offload(value: Any) -> dict[str, str]:
    """Read what a plan says: glob over parameter names to a word; empty where nothing is said.

    Raises:
        PlanError: a word or a glob that is none; the message quotes it.
    """
    if value is None:
        return {}
    rules = value if isinstance(value, Mapping) else {"*": value}
    found = {}
    for glob, word in rules.items():
        if not isinstance(glob, str):
            raise PlanError(f"plan zero.offload: a glob is a string, got {glob!r}.")
        expand_braces(glob)
        # By type: to Python 1 is True.
        if not isinstance(word, bool | str) or word not in _WORDS:
            near = did_you_mean(word, (OPTIMIZER, PARAMETERS)) if isinstance(word, str) else ""
            raise PlanError(f"plan zero.offload: there is no {word!r}.{near} {_HINT}")
        found[glob] = _WORDS[word]
    return found if any(found.values()) else {}


def wanted_offload(
    rules: OffloadRules, rows: Sequence[ParameterRow], *, host_only: bool
) -> tuple[dict[str, str], list[str]]:
    """Return a word for each parameter by its first name, and what is wrong with the rules.

    `host_only`: the devices of the mesh are the host, so that nothing has to move.
    """
    if host_only or not rules.offload:
        return {}, []
    found, problems = {}, []
    for row in rows:
        words = {rules.offload[glob] for glob in named_matches(rules.offload, row.names).values()}
        if len(words) > 1:
            problems.append(
                f"{listed(row.names)} are one parameter, and offload rules give it different "
                "words. Give its names one rule."
            )
        # One word, or none; where there are more, a problem has been noted.
        found[row.name] = min(words, default="")
    return found, problems


def with_offload(
    wanted: Mapping[str, str], rows: Sequence[ParameterRow]
) -> tuple[list[ParameterRow], list[str]]:
    """Return rows that have their levels with what lies on the host, and what cannot."""
    found, kept = [], []
    for row in rows:
        word = wanted.get(row.name, "") if row.zero else ""
        if word == PARAMETERS and row.zero < 3:
            kept.append(row.name)
        if word == _ALL:
            word = PARAMETERS if row.zero == 3 else OPTIMIZER
        found.append(replace(row, offload=word))
    problems = [
        f"offload='parameters': zero keeps {listed(kept)} on every rank's device between steps "
        "(levels 1 and 2). Say level 3 for them, or offload='optimizer' or True."
    ] * bool(kept)
    return found, problems


def offload_notes(
    rules: OffloadRules,
    wanted: Mapping[str, str],
    rows: Sequence[ParameterRow],
    axes: Iterable[str],
    *,
    host_only: bool,
) -> list[str]:
    """Return what is legal and may surprise."""
    if not rules.offload:
        return []
    if host_only:
        return ["offload: the devices of this mesh are the host, so nothing moves"]
    if rules.over not in axes:
        return [
            f"offload: nothing is stored as shards without the axis '{rules.over}'; one rank has "
            f"it as well, as mesh({rules.over}=1)"
        ]
    staying = [row.name for row in rows if wanted.get(row.name) and not row.offload]
    if not staying:
        return []
    return [f"offload: what zero does not shard stays on the device: {listed(staying)}"]


class OffloadedBuffer(Protocol):
    """What of a flat buffer the table tells."""

    @property
    def offload(self) -> str: ...
    @property
    def zero(self) -> int: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def stored_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def shard_bytes(self) -> int: ...
    @property
    def gradient_bytes(self) -> int: ...


def memory_table(buffers: Sequence[OffloadedBuffer]) -> str:
    """Return what lies where between steps, and what a step copies, that `explain` prints.

    Bytes of the rank with most, of the parameters in flat buffers. A step of one forward and one
    backward; microbatches copy to the device once each.
    """

    def total(of: str, *, host: bool) -> int:
        return sum(getattr(one, of) for one in buffers if host == bool(one.offload))

    moved = [one for one in buffers if one.offload]
    trained = [one for one in moved if one.trainable]
    grads = sum(one.shard_bytes for one in trained)
    states = sum(one.shard_bytes for one in buffers if one.trainable)
    # Level 3 gathers each unit for forward and again for backward.
    twice = [2 if one.zero == 3 and one.offload == PARAMETERS else 1 for one in moved]
    down = sum(one.shard_bytes * n for one, n in zip(moved, twice, strict=True))
    rows = [
        ("parameters", sum(one.stored_bytes for one in buffers), sum(o.host_bytes for o in moved)),
        ("gradients", sum(one.gradient_bytes for one in buffers), grads),
        # As large as the shard, on the side on which it is stepped.
        ("each optimizer state", states - grads, grads),
    ]
    lines = table(
        ["between steps", "device", "host"],
        [(what, human_bytes(here), human_bytes(there)) for what, here, there in rows],
        right=["device", "host"],
    )
    return (
        f"{lines}\n\na step copies up to {human_bytes(down)} to the device and "
        f"{human_bytes(grads)} of gradients to the host"
    )
