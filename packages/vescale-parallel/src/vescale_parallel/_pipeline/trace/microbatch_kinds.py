"""Defines what all stages know of a kind of microbatch, exchanged as text."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from vescale_parallel._errors import PipelineError
from vescale_parallel._pipeline.trace.hook_results import (
    FailedInHook,
    Inner,
    MissingInnerResult,
    is_collected,
)
from vescale_parallel._pipeline.trace.module_attributes import AttributeValue
from vescale_parallel._pipeline.trace.module_state import Write
from vescale_parallel._pipeline.trace.streams import Words
from vescale_parallel._pipeline.trace.tensor_specs import NestedSpecs, TensorSpec
from vescale_parallel._pipeline.trace.text import add_record


@add_record
class Call(NamedTuple):
    """A call of a unit.

    Attributes:
        words: what it drew.
        output: what it returned, but for the values; None where no later stage is there to ask.
        left: what it left in attributes of its modules.
        inner: results of modules within it that hooks are called with on other stages as well.
    """

    words: Words
    output: NestedSpecs | None
    left: tuple[AttributeValue, ...] = ()
    inner: tuple[Inner, ...] = ()


@add_record
class Entry(NamedTuple):
    """What a stage receives: arguments of its first block that are not its own.

    Attributes:
        paths: where they are among the arguments; or `path_of` a result of a module within an
            earlier block.
        specs: what they are.
        backs: for each whether a gradient goes back, the same on all ranks of the mesh; known once
            all of them have reported a trial run, see `loss_dependence`.
        uses: for each whether the loss of this pipeline's own rows depended on it in the
            trial run. False for what the stage received twice: either of the two may be used.
    """

    paths: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    backs: tuple[bool, ...] = ()
    uses: tuple[bool, ...] = ()

    @property
    def wanting(self) -> tuple[TensorSpec, ...]:
        """Those that gradients go back to: the same object each time, as messages are known by."""
        return self.specs if all(self.backs) else _wanting(self.specs, self.backs)


@lru_cache(maxsize=1024)
def _wanting(specs: tuple[TensorSpec, ...], backs: tuple[bool, ...]) -> tuple[TensorSpec, ...]:
    return tuple(one for one, goes in zip(specs, backs, strict=True) if goes)


Reach = tuple[int, str, tuple[str, ...]]
"""A stage, the path of a tensor that it gives to the next one, and those of what it received that
the tensor depends on."""


@add_record
class Kind(NamedTuple):
    """What is known of microbatches of one kind (their shapes) after a trial run.

    Attributes:
        calls: by the name of a unit and the number of the call.
        entries: by stage.
        ends: by stage, what a microbatch draws up to the end of it.
        total: the same of all stages.
        loss: what the loss is; None in a kind that is not tried to its end.
        uses: results of modules within blocks that are used outside of these, each with the last
            stage that does so.
        reaches: what gradients of the stages of this rank lead to, which no other rank knows.
        doubled: stages of this rank, and paths of what they received more than once.
        is_agreed: whether it is known which gradients go back.
        writes: state of modules that forwards of the stages write, in the order of the stages.
    """

    calls: dict[tuple[str, int], Call]
    entries: dict[int, Entry]
    ends: dict[int, Words]
    total: Words = ()
    loss: TensorSpec | None = None
    uses: tuple[tuple[str, int], ...] = ()
    reaches: tuple[Reach, ...] = ()
    doubled: tuple[tuple[int, str], ...] = ()
    is_agreed: bool = False
    writes: tuple[Write, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether nothing distributed goes from unit to unit, as it may on a mesh of one rank.

        What stands for distributed tensors is distributed as well, and cannot tell of its uses.
        """
        given = [call.output for call in self.calls.values() if call.output is not None]
        return all(spec.placements is None for one in given for spec in one.specs)


class RepeatedError(PipelineError):
    """What another stage has said: that one raises its own error.

    Attributes:
        lacks: whether it was an error of type `MissingInnerResult` there.
        in_hook: whether it was a `FailedInHook`.
    """

    lacks = in_hook = False


def is_lacking(failure: BaseException | None) -> bool:
    """Whether a stage failed for want of what modules within blocks of other stages compute."""
    return isinstance(failure, MissingInnerResult) or (
        isinstance(failure, RepeatedError) and failure.lacks
    )


def is_in_hook(failure: BaseException | None) -> bool:
    """Whether a hook of some stage failed at what stands for a result of another one."""
    if isinstance(failure, RepeatedError):
        return failure.in_hook
    return isinstance(failure, FailedInHook)


def trimmed(kind: Kind) -> Kind:
    """The same kind without what stages pass on and no later one uses."""
    last = dict(kind.uses)
    entries = {}
    for stage, entry in kind.entries.items():
        pairs = zip(entry.paths, entry.specs, strict=True)
        kept = [(p, s) for p, s in pairs if not is_collected(p) or last.get(p, -1) >= stage]
        entries[stage] = Entry(tuple(p for p, _ in kept), tuple(s for _, s in kept))
    return kind._replace(entries=entries)
