"""Parses what a plan says about its pipeline, before there is a model."""

from dataclasses import dataclass
from typing import Any, Final, Protocol

from vescale_parallel._errors import PlanError
from vescale_parallel._notation.batch import dim_of_rows
from vescale_parallel._notation.glob import expand_braces
from vescale_parallel._notation.layout import RuleLayout
from vescale_parallel._pipeline.plan.schedule_choice import Own, parse_schedule
from vescale_parallel._schedules.actions import Schedule

AXIS: Final = "pp"
"""The mesh axis that stages lie on."""


@dataclass(frozen=True)
class PipelineRules:
    """What a plan says, parsed.

    Attributes:
        is_used: whether it says anything.
        stages: globs over names of modules that are blocks; none: the repeated blocks of the model.
        by_stage: whether there is one glob for each stage, and not one for all blocks.
        schedule: name of the schedule, or a user's own.
        microbatches: how many a batch is divided into.
        chunks: stages of each rank, for "interleaved"; at most so many for "auto".
        memory: for "auto", bytes that a rank may keep from forwards to backwards.
        everywhere: globs over names of modules outside of the blocks whose parameters every stage
            holds.
    """

    is_used: bool = False
    stages: tuple[str, ...] = ()
    by_stage: bool = False
    schedule: str | Schedule | Own = "1f1b"
    microbatches: int = 1
    chunks: int = 2
    memory: float | None = None
    everywhere: tuple[str, ...] = ()


class PipelineWords(Protocol):
    """What a plan says of `pipeline`, as a user wrote it: anything at all."""

    @property
    def schedule(self) -> Any: ...
    @property
    def stages(self) -> Any: ...
    @property
    def chunks(self) -> Any: ...
    @property
    def memory(self) -> Any: ...
    @property
    def everywhere(self) -> Any: ...


def parse_pipeline(said: PipelineWords | None, microbatches: int | None) -> PipelineRules:
    """Read what a plan says of its stages and microbatches.

    Args:
        said: the field `pipeline`.
        microbatches: the field `microbatches`.

    Raises:
        PlanError: a value is none that its field can have.
    """
    if said is None:
        return PipelineRules(microbatches=_count(microbatches))
    schedule = parse_schedule(said.schedule)
    # A schedule of the user's own says by itself how many there are.
    if isinstance(schedule, Schedule) and microbatches is None:
        microbatches = schedule.microbatches
    return PipelineRules(
        is_used=True,
        stages=_globs("stages", said.stages),
        by_stage=isinstance(said.stages, list | tuple),
        schedule=schedule,
        microbatches=_count(microbatches),
        chunks=_positive("pipeline.chunks", said.chunks),
        memory=None if said.memory is None else float(_positive("pipeline.memory", said.memory)),
        everywhere=_globs("everywhere", said.everywhere),
    )


class ResolvedReport(Protocol):
    """What is asked of a report."""

    @property
    def split(self) -> object | None:
        """The stages."""

    @property
    def microbatches(self) -> int:
        """How many."""

    @property
    def batch(self) -> RuleLayout | None:
        """The layout of the batch."""

    @property
    def over(self) -> str:
        """The axis of `zero`."""


def require_together(report: ResolvedReport, batch_is: str, deterministic: object) -> None:
    """Refuse other words of a plan that do not go with stages, or with microbatches.

    Args:
        report: what the plan asks for.
        batch_is: the plan's field.
        deterministic: the plan's field.

    Raises:
        PlanError: they do not.
    """
    parts = {"stages": report.split is not None, "microbatches": report.microbatches > 1}
    asked = " and ".join(name for name, is_asked in parts.items() if is_asked)
    if asked and deterministic is not None:
        raise PlanError(
            f"plan: {asked} with deterministic={deterministic!r}, whose parts are its logical "
            "shards. Leave one of them out."
        )
    if asked and batch_is == "local":
        raise PlanError(
            f"plan: {asked} with batch_is='local': microbatches are rows of the whole batch. Pass "
            "it on every rank, with batch_is='global'."
        )
    if asked:
        dim_of_rows(report.batch, report.over)


def _count(microbatches: object) -> int:
    return 1 if microbatches is None else _positive("microbatches", microbatches)


def _positive(word: str, value: object) -> int:
    # To Python True is 1.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"plan {word}: expected a positive number, got {value!r}.")
    return value


def _globs(word: str, value: object) -> tuple[str, ...]:
    globs = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(globs, list | tuple) or not all(isinstance(one, str) for one in globs):
        raise PlanError(f"plan pipeline.{word}: expected a glob, or a list of them, got {value!r}.")
    for glob in globs:
        expand_braces(glob)
    return tuple(globs)
