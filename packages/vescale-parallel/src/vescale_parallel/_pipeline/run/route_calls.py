"""Calls of units in a forward that follows a route, where no function has to be watched.

By far the most calls of a step are such. In a step of small blocks each function that they call
shows, so that a turn of the route is looked up here and not asked for, and what was found in an
earlier forward is not looked for again.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from torch import Tensor

from vescale_parallel._pipeline.run.rank_stages import Unit
from vescale_parallel._pipeline.trace.argument_positions import SameArguments
from vescale_parallel._pipeline.trace.foreign_values import ForeignValues
from vescale_parallel._pipeline.trace.route import RouteFollower, Turn


class Stage(Protocol):
    """The forward whose units are called."""

    def call_at(
        self, turn: Turn | None, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Enter and compute a unit at this turn; None: it has to be found out what is due."""

    def stand_in_at(self, turn: Turn) -> Any:
        """What a unit of another stage returns."""

    def taken(self, unknown: list[str]) -> list[Tensor]:
        """What the stage before has sent, in place of what is missing at these paths."""

    def hand_over(self, call: dict[str, Tensor]) -> NoReturn:
        """Give these tensors to the next stage, and end."""


class RouteCalls:
    """The quiet calls of one forward, or of one after another of the same stage.

    Args:
        stage: the forward.
        way: the route that it follows.
        foreign: marks values of other stages.

    Attributes:
        ready: by the `id` of a turn, what stands in there in each forward.
        same: where in the arguments tensors are that pass between stages.
    """

    def __init__(self, stage: Stage, way: RouteFollower, foreign: ForeignValues) -> None:
        self._stage, self._way, self._foreign = stage, way, foreign
        self.ready: dict[int, Tensor] = {}
        self.same = SameArguments(foreign)

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model calls a unit; returns its result."""
        way, turn = self._way, None
        # `Following.due` written out.
        at = way.at
        if at < len(way.turns) and way.turns[at].name == unit.name and not way.left:
            turn = way.turns[at]
            way.at = at + 1
        if turn is None or not unit.leaves:
            return self._stage.call_at(turn, unit, args, kwargs)
        act = turn.act
        if act == "run":
            if self._foreign.is_plainly_known(args, kwargs):
                return unit.forward(*args, **kwargs)
        elif act == "stand in":
            ready = self.ready.get(id(turn))
            return self._stage.stand_in_at(turn) if ready is None else ready
        elif not unit.module._forward_pre_hooks:
            # Where there is something to give, it does not come back: the forward ends there.
            self._hand_over_as_before(act, args, kwargs)
            given = self._taken_as_before(act, args, kwargs)
            if given is not None:
                return unit.forward(*given)
        return self._stage.call_at(turn, unit, args, kwargs)

    def _taken_as_before(
        self, act: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any] | None:
        found = self.same.lacking(args, kwargs) if act == "take over" else None
        if found is None:
            return None
        places, paths = found
        given = list(args)
        for at, one in zip(places, self._stage.taken(paths), strict=True):
            self._foreign.known[id(args[at])] = given[at] = one
        return given

    def _hand_over_as_before(self, act: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self.same.handed(args, kwargs) if act == "give" else None
        if call is not None:
            self._stage.hand_over(call)
