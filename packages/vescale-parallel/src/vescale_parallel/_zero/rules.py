"""Parses what a plan says about ZeRO: levels by glob, the axis, units."""

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from vescale_parallel._errors import PlanError
from vescale_parallel._notation.glob import expand_braces
from vescale_parallel._zero.offload import parse_offload
from vescale_parallel._zero.precision import Dtypes, parse_precision
from vescale_parallel._zero.reduce_ahead import AUTO

LEVELS: Final = {
    0: "nothing is sharded",
    1: "optimizer states",
    2: "optimizer states and gradients",
    3: "optimizer states, gradients and parameters",
}
"""What each level shards over the axis."""

_CATCH_ALL: Final = "*"
_UNITS: Final = f"a number of units, 0 or more, or '{AUTO}'"


@dataclass(frozen=True)
class ZeroRules:
    """What a plan says about ZeRO, parsed.

    Attributes:
        levels: glob over parameter names to a level of `LEVELS`; the first match wins.
        over: the mesh axis that shards.
        units: globs over names of modules that are gathered as one; none: repeated blocks.
        prefetch: how many units are gathered ahead; None: one, and in forward small ones together.
        reduce_ahead: of how many units gradients are reduced while others compute; None: as many as
            cost no memory that matters, see `reduce_ahead_of`.
        owned: globs over names of parameters that one rank of `over` stores in full.
        block: so many elements in a row of a parameter stay on one rank.
        tile_rows: so many rows of a matrix stay on one rank.
        precision: glob over names of parameters and buffers to dtypes; the first match wins.
        offload: glob over names of parameters to what of them lies on the host; the first wins.
    """

    levels: Mapping[str, int]
    over: str
    units: tuple[str, ...]
    prefetch: int | None
    reduce_ahead: int | None
    precision: Mapping[str, Dtypes]
    owned: tuple[str, ...]
    block: int
    tile_rows: int
    offload: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_used(self) -> bool:
        """Whether anything is sharded at all."""
        return any(self.levels.values())


class ZeroWords(Protocol):
    """What a plan says of `zero`, as a user wrote it: anything at all."""

    @property
    def level(self) -> Any: ...
    @property
    def over(self) -> Any: ...
    @property
    def units(self) -> Any: ...
    @property
    def prefetch(self) -> Any: ...
    @property
    def reduce_ahead(self) -> Any: ...
    @property
    def owned(self) -> Any: ...
    @property
    def block(self) -> Any: ...
    @property
    def offload(self) -> Any: ...


def parse_zero(said: ZeroWords, precision: object) -> ZeroRules:
    """Read what a plan says of `zero`, and of `precision`.

    Raises:
        PlanError: a level, axis, glob, number or dtype that is none; the message quotes it.
    """
    level, over = said.level, said.over
    levels: dict[str, Any] = dict(level) if isinstance(level, Mapping) else {_CATCH_ALL: level}
    for glob, one in levels.items():
        _check_level(glob, one)
    # `mesh(dp=2)` names axes by keyword: what is none cannot be one of its axes.
    if not isinstance(over, str) or not over.isidentifier() or keyword.iskeyword(over):
        raise PlanError(f"plan zero.over={over!r}: name one mesh axis, as over='dp'.")
    block, tile_rows = _block(said.block)
    rules = ZeroRules(
        levels=levels,
        over=over,
        units=_globs("units", said.units),
        prefetch=None if said.prefetch == AUTO else _number("prefetch", said.prefetch, _UNITS, 0),
        reduce_ahead=None
        if said.reduce_ahead == AUTO
        else _number("reduce_ahead", said.reduce_ahead, _UNITS, 0),
        precision=parse_precision(precision),
        owned=_globs("owned", said.owned),
        block=block,
        tile_rows=tile_rows,
        offload=parse_offload(said.offload),
    )
    # Ignored in silence, they would let a user believe that an optimizer sees full matrices.
    if (rules.owned or max(block, tile_rows) > 1) and not rules.is_used:
        word = "owned" if rules.owned else "block"
        raise PlanError(
            f"plan zero.{word}: it says how zero shards parameters, and zero=0 shards none. Say "
            f"Zero(1, {word}=...), 2 or 3."
        )
    if rules.offload and not rules.is_used:
        raise PlanError(
            "plan zero.offload: what lies on the host is what zero stores as shards, and zero=0 "
            f"stores none. Say Zero(1, offload=...), 2 or 3; one rank has shards, too, as "
            f"mesh({over}=1)."
        )
    return rules


def _globs(word: str, value: Any) -> tuple[str, ...]:
    globs = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(globs, list | tuple) or not all(isinstance(one, str) for one in globs):
        raise PlanError(f"plan zero.{word}: expected a glob, or a list of them, got {value!r}.")
    for glob in globs:
        expand_braces(glob)
    return tuple(globs)


def _block(value: Any) -> tuple[int, int]:
    """Return how many elements, and how many rows of matrices, stay on one rank."""
    meant = "a number of elements, 1 or more, or the two extents of a tile, as (128, 128)"
    if not isinstance(value, tuple):
        return _number("block", value, meant, 1), 1
    if len(value) != 2:
        raise PlanError(f"plan zero.block={value!r}: {meant}.")
    rows, _ = (_number("block", extent, meant, 1) for extent in value)
    # Rows are never sharded within a tile's rows, so its columns are kept whatever they are.
    return 1, rows


def _number(word: str, value: Any, meant: str, least: int) -> int:
    # To Python True is 1, and `prefetch=True` would be a number.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(f"plan zero.{word}={value!r}: {meant}.")
    return value


def _check_level(glob: object, level: object) -> None:
    if not isinstance(glob, str):
        raise PlanError(f"plan zero: a glob is a string, got {glob!r}.")
    expand_braces(glob)
    # As above: `zero=True` would be level 1, which is rarely what is meant.
    if isinstance(level, bool) or not isinstance(level, int) or level not in LEVELS:
        said = ", ".join(f"{number}: {what}" for number, what in LEVELS.items())
        where = "" if glob == _CATCH_ALL else f" of '{glob}'"
        raise PlanError(
            f"plan zero{where}: there is no level {level!r}. Levels shard over one axis: {said}."
        )
