"""The units that a forward of a stage calls, in their order: noted in one, followed by the next.

For microbatches of one kind a model calls its modules alike, and what happens at each call follows
from that: it is stood in for, it runs, it is where the stage begins or ends. So the second forward
looks whether the module that is called is the one that is due, and need not find out anew what to
do. A model that calls another one leaves the route there, and is looked at closely from then on.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

Act = Literal["stand in", "run", "take over", "give"]


class Turn(NamedTuple):
    """A call of a unit.

    Attributes:
        name: of the unit.
        act: what a stage does at it.
        number: which call of the unit it is.
        call: what is known of it, where it is stood in for.
    """

    name: str
    act: Act
    number: int
    call: Any = None


class Route(NamedTuple):
    """The calls of a forward of a stage.

    Attributes:
        turns: they.
        is_quiet: whether the model passes values of other stages on, and no function takes them.
    """

    turns: tuple[Turn, ...]
    is_quiet: bool = False


Routes = dict[int, Route]
"""By stage; of one kind of microbatch, on one rank."""

_NONE: Final = Route(())


class RouteFollower:
    """A forward that notes its route, or follows one that was noted.

    Attributes:
        left: whether there is no route, or the forward has left it.
        is_quiet: as that of the route.
        turns: of the route.
        at: the one that is due.
    """

    def __init__(self, stage: int, routes: Routes | None) -> None:
        self._stage, self._routes = stage, routes
        route = _NONE if routes is None else routes.get(stage, _NONE)
        self.turns, self.is_quiet = route.turns, route.is_quiet
        self.at = 0
        self.left = not self.turns
        # What is noted; None: nothing shall be.
        self._noted: list[Turn] | None = [] if self.left and routes is not None else None

    def due(self, name: str) -> Turn | None:
        """The turn of a unit that is called, if it is the one that is due."""
        at = self.at
        if self.left or at >= len(self.turns) or self.turns[at][0] != name:
            return None
        self.at = at + 1
        return self.turns[at]

    def now(self, name: str) -> Turn | None:
        """The turn that `due` gave last, if it is that of this unit."""
        turn = None if self.left or not self.at else self.turns[self.at - 1]
        return turn if turn is not None and turn.name == name else None

    def leave(self, *, before: bool = False) -> list[str]:
        """Leave the route; returns the names of the units that were called on it.

        Args:
            before: the turn that `due` gave last could not be followed, and does not count.
        """
        done = [one.name for one in self.turns[: self.at - before]]
        self.left = True
        self.drop()
        return done

    def drop(self) -> None:
        """Let the next forward note a route of its own."""
        if self._routes is not None:
            self._routes.pop(self._stage, None)

    def note(self, turn: Turn) -> None:
        """Note a call that was looked at closely."""
        if self._noted is not None:
            self._noted.append(turn)

    def forget(self) -> None:
        """What was decided for this forward may be decided otherwise for the next one."""
        self._noted = None

    def is_done(self) -> bool:
        """Whether the forward has followed its route to the end."""
        return not self.left and self.at == len(self.turns)

    def ended(self, *, is_quiet: bool = False) -> None:
        """The forward has ended, and nothing was wrong."""
        if self._noted and self._routes is not None:
            self._routes[self._stage] = Route(tuple(self._noted), is_quiet)
