"""Fields of a plan that have fields of their own: `Zero`, `Pipeline`, `Invariant`.

In a plan a number or a string stands for one of them where it says enough. `Plan` keeps the
classes; here is also how they are merged, edited field by field, and read from files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from vescale_parallel._common.messages import did_you_mean, nearest
from vescale_parallel._errors import PlanError
from vescale_parallel._invariant.resolve import DP_INVARIANT, require_shards
from vescale_parallel._pipeline.plan.schedule_choice import Own, read_schedule
from vescale_parallel._plan.words import default_of
from vescale_parallel._schedules.actions import Schedule
from vescale_parallel._zero.offload import spelled_offload


@dataclass(frozen=True)
class Zero:
    """What is sharded over one axis besides the layouts: `Plan(zero=Zero(3, prefetch=2))`.

    `Plan(zero=3)` says the level alone.

    Attributes:
        level: 0, the default, nothing; 1 optimizer states, 2 and gradients, 3 and parameters. Or
            glob over parameter names to such a level, as `{"embed*": 1, "*": 3}`; the first match
            wins.
        over: the mesh axis that is sharded over, by default "dp". Another axis that shards the
            batch then only replicates (HSDP), as in
            `Plan(batch="replica:0, dp:0", zero=Zero(3, over="dp"))`.
        units: glob, or globs, over names of modules whose parameters are gathered as one. None, the
            default: the repeated blocks of the model (the members of a list of one type), and the
            rest.
        prefetch: how many units are gathered ahead of the one that computes; "auto", the default:
            one, and in forward, at level 3, as many as take 1 MiB together, by one collective.
        reduce_ahead: of how many units gradients are reduced while backward goes on computing; 0:
            it waits for each. Each takes memory for all gradients of a unit. "auto", the default:
            as many as take 4 MiB together, so that small units overlap and large ones do not; what
            takes 1 MiB together is reduced by one collective.
        owned: glob, or globs, over names of parameters that are not cut: one rank of `over` stores
            each in full, and steps it, as an optimizer of matrices (Muon, Shampoo) needs. Owners
            are balanced by what such a step costs, over all units. None, the default: all are cut.
        block: so many elements in a row of a local parameter stay on one rank, as the blocks of an
            optimizer with quantised states, by default 1; or the rows and columns of tiles of its
            matrices, as (128, 128).
        offload: what lies in memory of the host of what is sharded. True: all. "optimizer":
            parameters as an optimizer steps them, their gradients and states, and the device keeps
            the values that it computes with. "parameters" (at level 3): those as well. Or glob over
            parameter names to one of these, or "none". None, the default: nothing.
    """

    level: int | Mapping[str, int] = 0
    _: KW_ONLY
    over: str = "dp"
    units: str | Sequence[str] | None = None
    prefetch: int | Literal["auto"] = "auto"
    reduce_ahead: int | Literal["auto"] = "auto"
    owned: str | Sequence[str] | None = None
    block: int | tuple[int, int] = 1
    offload: bool | str | Mapping[str, bool | str] | None = None

    def __post_init__(self) -> None:
        """Keep copies, in the form that files have as well."""
        if isinstance(self.level, Mapping):
            object.__setattr__(self, "level", dict(self.level))
        _tuples(self, "units", "owned", "block")
        object.__setattr__(self, "offload", spelled_offload(self.offload))


@dataclass(frozen=True)
class Pipeline:
    """Stages over the axis "pp": `Plan(pipeline=Pipeline("zbv", stages="blocks.*"), ...)`.

    `Plan(pipeline="zbv")` says the schedule alone. Into how many microbatches a batch is divided
    says `Plan(microbatches=n)`.

    Attributes:
        schedule: a name of `schedules.SCHEDULES`, by default "1f1b"; "auto" (the fastest, by
            measured times), a CSV file (a name that ends in .csv) or its text, a `Schedule`, or a
            function of the numbers of ranks and microbatches that returns one.
        stages: glob over names of modules that are the blocks which stages are made of, or a list
            with one glob for each stage. None, the default: the repeated blocks of the model.
        chunks: stages of each rank, for "interleaved", by default 2; at most so many for "auto".
        memory: for "auto", bytes that a rank may keep from forwards to backwards. None, the
            default: any number.
        everywhere: glob, or globs, over names of modules outside of the blocks whose parameters
            every stage holds, and whose gradients are summed over the stages. None, the default:
            none beside those that several stages use.
    """

    schedule: str | Path | Schedule | Own = "1f1b"
    _: KW_ONLY
    stages: str | Sequence[str] | None = None
    chunks: int = 2
    memory: int | None = None
    everywhere: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Keep copies, in the form that files have as well: of a CSV file its text."""
        object.__setattr__(self, "schedule", read_schedule(self.schedule))
        _tuples(self, "stages", "everywhere")


@dataclass(frozen=True)
class Invariant:
    """The same bits on any number of data-parallel ranks: `Plan(deterministic=Invariant(8))`.

    `Plan(deterministic="dp-invariant")` says it with 8 shards. Steps are made by
    `forward_backward`.

    Attributes:
        shards: logical shards that the batch is cut into, by default 8, each computed by itself; no
            more ranks may share the batch. Results depend on this number, and not on that of ranks.
    """

    shards: int = 8

    def __post_init__(self) -> None:
        """Read the number."""
        require_shards(self.shards)


NESTED: Final[Mapping[str, type[Zero] | type[Pipeline] | type[Invariant]]] = {
    "zero": Zero,
    "pipeline": Pipeline,
    "deterministic": Invariant,
}
"""Those fields of a plan, by name."""

_FIRST: Final = {"zero": "level", "pipeline": "schedule"}
"""What a number or a string in place of the class says."""


def as_zero(value: Any) -> Zero:
    """Return what a plan says of `zero`; a level, or levels by glob, will do."""
    return value if isinstance(value, Zero) else Zero(value)


def as_pipeline(value: Any) -> Pipeline | None:
    """Return what a plan says of `pipeline`; a schedule will do.

    Raises:
        PlanError: it is a mapping, or its CSV file cannot be read.
    """
    if isinstance(value, Mapping):
        raise PlanError(
            f"plan pipeline: expected a schedule, as '1f1b', or Pipeline({_names(Pipeline)}), got "
            f"{value!r}. How many microbatches there are says Plan(microbatches=n)."
        )
    return value if value is None or isinstance(value, Pipeline) else Pipeline(value)


def as_invariant(value: Any) -> Invariant | None:
    """Return what a plan says of `deterministic`.

    Raises:
        PlanError: it is something else.
    """
    if value is None or isinstance(value, Invariant):
        return value
    if value == DP_INVARIANT:
        return Invariant()
    raise PlanError(
        f"plan deterministic={value!r}: Invariant(shards=8) or '{DP_INVARIANT}', for the same bits "
        "on any number of data-parallel ranks, or None."
    )


def non_default(one: Any) -> dict[str, Any]:
    """Return the fields of a plan, or of one of its fields, that are not at their default."""
    return {
        each.name: value
        for each in fields(one)
        if (value := getattr(one, each.name)) != default_of(each)
    }


def merged_fields(plan: Any, other: Any) -> dict[str, Any]:
    """Return what `other` says, nested fields with what only `plan` says of them."""
    found = non_default(other)
    for name in NESTED.keys() & found.keys():
        mine, said = getattr(plan, name), non_default(found[name])
        if mine is not None:
            # A default that was written, as "1f1b" in a plan that else would have no stages.
            first = fields(mine)[0].name
            found[name] = replace(mine, **(said or {first: getattr(found[name], first)}))
    return found


def edited_fields(plan: Any, words: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of the plan for words that are fields of it, or of one of its fields.

    Raises:
        PlanError: a word is neither.
    """
    known = [one.name for one in fields(plan)]
    found = {}
    for name, value in words.items():
        if name in known:
            found[name] = _edited(name, getattr(plan, name), value)
    for name, value in words.items():
        if name in known:
            continue
        owner = _owner(name)
        if owner is None:
            raise PlanError(_unknown(name, known))
        mine = found.get(owner, getattr(plan, owner))
        if mine is None and owner in found:
            raise PlanError(f"{owner}=None and {name}={value!r}: leave one of them out.")
        # "dp-invariant" is the one word that is no class by now, and says what the class says.
        base = mine if isinstance(mine, NESTED[owner]) else NESTED[owner]()
        found[owner] = replace(base, **{name: value})
    return found


def _edited(name: str, mine: Any, value: Any) -> Any:
    """What a number or a string does not say, stays."""
    is_whole = value is None or name not in _FIRST or isinstance(value, NESTED[name])
    return value if is_whole or mine is None else replace(mine, **{_FIRST[name]: value})


def without_idle(one: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plan, or one of its fields, holds, without what is None and need not be said.

    TOML has no word for nothing.
    """
    found = {}
    for each in fields(one):
        value = content[each.name]
        if value is None is default_of(each):
            continue
        inner = getattr(one, each.name)
        found[each.name] = without_idle(inner, value) if is_dataclass(inner) else value
    return found


def plan_fields(content: Any, what: str, known: list[str]) -> dict[str, Any]:
    """Return what was read as JSON or TOML (`what`), if these fields of a plan are all that it has.

    Raises:
        PlanError: it is no plan, or has something else in it.
    """
    # Every plan that was written has that key, by which other files are told from plans.
    if not isinstance(content, dict) or "parameters" not in content:
        raise PlanError(f"a plan as {what} is an object with the keys {known}.")
    for name in content:
        if name not in known:
            raise PlanError(_unknown(name, known))
    return {name: _read(name, value) for name, value in content.items()}


def _read(name: str, value: Any) -> Any:
    """Return a field as a file has it; a table of a field that has fields is those."""
    if name not in NESTED or not isinstance(value, dict):
        return value
    known = [one.name for one in fields(NESTED[name])]
    for one in value:
        if one not in known:
            where = " Levels by glob stand under 'zero.level'." if name == "zero" else ""
            raise PlanError(
                f"a plan has no '{name}.{one}'.{did_you_mean(one, known)} Of {name} it has "
                f"{known}.{where}"
            )
    return NESTED[name](**value)


def _unknown(name: str, known: list[str]) -> str:
    owner = _owner(name)
    if owner is not None:
        return f"a plan has no '{name}': that is a field of {owner}, '{owner}.{name}'."
    places = {one: one for one in known}
    for of, kind in NESTED.items():
        places |= {one.name: f"{of}.{one.name}" for one in fields(kind)}
    near = [f" Did you mean '{places[one]}'?" for one in nearest(name, places, limit=1)]
    return f"a plan has no '{name}'.{''.join(near)} It has {known}."


def _owner(name: str) -> str | None:
    found = (owner for owner, kind in NESTED.items() if name in {one.name for one in fields(kind)})
    return next(found, None)


def _names(kind: Any) -> str:
    return ", ".join(f"{one.name}=..." for one in fields(kind))


def _tuples(one: Any, *names: str) -> None:
    # A list, as JSON has it, and a tuple say the same.
    for name in names:
        if isinstance(value := getattr(one, name), list):
            object.__setattr__(one, name, tuple(value))
