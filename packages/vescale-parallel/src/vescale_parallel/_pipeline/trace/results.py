"""Results of units, and of modules within them, that one forward of a stage passes on or takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_parallel._common.messages import listed
from vescale_parallel._pipeline.trace.foreign_values import ForeignValues
from vescale_parallel._pipeline.trace.hook_results import (
    Inner,
    MissingInnerResult,
    described_call,
    named_results,
)
from vescale_parallel._pipeline.trace.microbatch_kinds import Call
from vescale_parallel._pipeline.trace.tensor_specs import NestedSpecs

StandsIn = Callable[[NestedSpecs], tuple[Any, list[Tensor]]]
"""A nesting of tensors whose values mean nothing, and these tensors."""


class Results:
    """What hooks of the model may collect, by paths that are the same on all stages.

    Args:
        foreign: marks values of other stages.
        stage: whose forward this is.
        uses: which results are used outside of the units, each with the last stage that does so.
        is_trial: nobody knows yet which are used, and all are passed on.
    """

    def __init__(
        self,
        foreign: ForeignValues,
        stage: int,
        uses: Iterable[tuple[str, int]],
        is_trial: bool,
    ) -> None:
        self._foreign, self._stage, self._is_trial = foreign, stage, is_trial
        self._uses = dict(uses)
        # Of this stage, and what stands for those of earlier ones.
        self._every: dict[str, Tensor] = {}
        # The unit of this stage that runs, and the calls within it that others hear of.
        self._now: tuple[str, int] | None = None
        self._count = 0
        self._inner: list[Inner] = []

    def begin(self, name: str, number: int) -> None:
        """A unit of this stage runs; `number` says which of its calls it is."""
        self._now, self._count = (name, number), 0

    def within(self, unit: str, name: str, given: Any, output: Any) -> None:
        """A module within a unit has returned."""
        if self._now is None or self._now[0] != unit:
            return
        found = named_results(self._now, output, self._count)
        self._count += 1
        self._keep(found)
        if self._foreign.leaks is not None:
            self._inner.append(described_call(name, given, output))
            self._foreign.leaks.give_out(found.values())

    def end(self, output: Any, *, collects: bool) -> tuple[Inner, ...]:
        """The unit has returned; what others receive of the calls within it."""
        if collects and self._now is not None:
            self._keep(named_results(self._now, output))
        self._now, inner = None, tuple(self._inner)
        self._inner = []
        return inner

    def _keep(self, found: Mapping[str, Tensor]) -> None:
        self._every |= {p: t for p, t in found.items() if self._is_used(p, self._stage + 1)}

    def _is_used(self, path: str, stage: int) -> bool:
        """Whether a stage from this one on uses it."""
        return self._is_trial or self._uses.get(path, -1) >= stage

    def stand_in(
        self, unit: tuple[str, int], call: Call, value: Any, standing: StandsIn
    ) -> list[tuple[str, Any, Any]]:
        """Note what stands for the result of a unit of another stage.

        Returns:
            For each call within it the module, its (args, kwargs) and its result: what stands for
            them.
        """
        self._note(named_results(unit, value))
        calls = []
        for at, inner in enumerate(call.inner):
            given, unknown = standing(inner.given)
            output, made = standing(inner.output)
            self._foreign.mark([*unknown, *made])
            self._note(named_results(unit, output, at))
            calls.append((inner.module, given, output))
        return calls

    def _note(self, found: Mapping[str, Tensor]) -> None:
        self._every |= found
        self._foreign.collected |= {id(one): path for path, one in found.items()}

    def to_take(self) -> dict[str, Tensor]:
        """What this stage takes from the one before: by path, what stands for it."""
        return {p: one for p, one in self._every.items() if self._is_used(p, self._stage)}

    def to_give(self) -> dict[str, Tensor]:
        """What this stage has for the next one, its own and what has come."""
        known = self._foreign.known
        return {path: known.get(id(one), one) for path, one in self._every.items()}

    def known(self, output: Any) -> Any:
        """What the model returned, with what has come from other stages in its place.

        Raises:
            Lacking: there is something in it that only other stages have.
        """
        given = tensors_within(output)
        self._foreign.note_used(given)
        found = self._foreign.resolved(output)
        lacks, leaks = self._foreign.unknown_within(found), self._foreign.leaks
        if lacks or (leaks is not None and leaks.left_block(given)):
            what = f" in {listed(lacks)}" if lacks else ""
            raise MissingInnerResult(
                f"the model returns on stage {self._stage} what was computed within its blocks, or "
                f"on earlier stages, and is not what the last block returns: those of other stages "
                f"are missing{what}. Let the blocks return it, or leave it out."
            )
        return found
