"""Checks which units a forward of a stage has called, and the order of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from vescale_parallel._errors import PipelineError

Key = tuple[str, int]
"""A unit, and which of its calls: a shared module is called several times in a forward."""


class UnitCalls:
    """The units that were called.

    Args:
        blocks: the model's blocks in order, by name, and which one each is.
        stage: whose forward this is.
    """

    def __init__(self, blocks: Mapping[str, int], stage: int) -> None:
        self._blocks, self._stage = blocks, stage
        self._calls: Counter[str] = Counter()
        self._next = 0

    def note(self, names: Iterable[str]) -> None:
        """Units were called, of which nothing had to be found out."""
        for name in names:
            self._calls[name] += 1
            self._next += name in self._blocks

    def one(self, name: str) -> Key:
        """A unit is called.

        Raises:
            PipelineError: a block that is not due.
        """
        number = self._blocks.get(name)
        if number is not None:
            if number != self._next:
                raise PipelineError(
                    f"the model calls block '{name}' where '{self._due() or 'none'}' is due. A "
                    "pipeline needs each block called once, in the order of the model."
                )
            self._next += 1
        self._calls[name] += 1
        return self.latest(name)

    def latest(self, name: str) -> Key:
        """The latest call of a unit."""
        return name, self._calls[name] - 1

    def _due(self) -> str | None:
        return list(self._blocks)[self._next] if self._next < len(self._blocks) else None

    def require_all(self, *, has_followed: bool, is_last: bool) -> None:
        """Refuse a model that has returned before its stage has ended.

        Args:
            has_followed: whether it has followed a route to its end, and so has called all.
            is_last: whether the stage is the last one: others end before the next one's block.

        Raises:
            PipelineError: it has.
        """
        if is_last and (has_followed or self._next >= len(self._blocks)):
            return
        due = self._due() or list(self._blocks)[-1]
        raise PipelineError(
            f"the model returned on stage {self._stage} after {self._next} of {len(self._blocks)} "
            f"blocks: '{due}' was not called. Each forward has to call each block once, in order."
        )
