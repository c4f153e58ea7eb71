"""Handles of collectives that are under way."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from vescale_comm._engine.autograd import Linear, StartedLinear, apply
from vescale_comm._errors import CommError
from vescale_comm._torch.call_site import CallPlace, call_place, call_site, site_of
from vescale_comm._torch.compat import current_world

Result = TypeVar("Result")


class UnwaitedWarning(RuntimeWarning):
    """A handle was dropped and never waited for: its result is lost, and its buffers may be too."""


class _Finishable(Protocol):
    def finish(self) -> Any:
        """Wait and return the result."""


class Pending(Generic[Result]):
    """A collective under way, returned by `async_op=True`; `wait()` gives its result, once.

    What it sends and receives is kept alive by the handle. The input must not be written before it
    is waited for. A handle that is dropped unwaited warns (`UnwaitedWarning`) with the line that
    made it; `unwaited()` lists those that are still alive.
    """

    __slots__ = ("__weakref__", "_name", "_place", "_started", "_then", "_waited_at", "_world")

    def __init__(self, name: str, started: _Finishable, then: Callable[[Any], Result]) -> None:
        self._name = name
        # In words only where somebody is told.
        self._place = call_place()
        self._waited_at: CallPlace | None = None
        self._then = then
        self._started: _Finishable | None = started
        self._world = current_world()
        # Weakly: a handle without references has to die, and warn.
        _alive[id(self)] = weakref.ref(self)

    def wait(self) -> Result:
        """Return the result when it is there.

        Raises:
            CommError: it was waited for before; the message says where.
        """
        # Removed first: a wait that raises has used the handle up, and keeps no buffers.
        started, self._started = self._started, None
        if started is None:
            raise CommError(
                f"the handle of {self._name} from {site_of(self._place)} was waited for twice: "
                f"first at {site_of(self._waited_at)}, now at {call_site()}. Keep what wait() "
                "returned"
            )
        del _alive[id(self)]
        self._waited_at = call_place()
        return self._then(started.finish())

    def __repr__(self) -> str:
        # Never asks the backend: printing a handle must not wait or advance other simulated ranks.
        waits = self._started is not None
        state = "under way" if waits else f"waited for at {site_of(self._waited_at)}"
        return f"Pending({self._name} from {site_of(self._place)}, {state})"

    def __del__(self) -> None:
        # Missing where `__init__` raised before it was set; `__del__` runs all the same.
        started = getattr(self, "_started", None)
        if started is None:
            return
        self._started = None
        del _alive[id(self)]
        # Not waited for here: the other members may never come, and this may be the garbage
        # collector's doing, at any line of the program.
        message = f"the handle of {self._name} from {site_of(self._place)} was never waited for"
        warnings.warn(message, UnwaitedWarning, stacklevel=2, source=self)


# Those under way, by id, which leave it by themselves: methods of a WeakSet are calls of Python.
_alive: dict[int, "weakref.ref[Pending[Any]]"] = {}


def unwaited() -> list[str]:
    """Return a line for each handle of this process that is under way: op, and where it began."""
    world = current_world()  # the handles of other simulated ranks are not this one's
    living = [each for ref in list(_alive.values()) if (each := ref()) is not None]
    mine = [each for each in living if each._started is not None and each._world is world]
    return sorted(map(repr, mine))


def identity(x: Any) -> Any:
    """Return it: what is made of a result that is as it should be."""
    return x


def run_or_start(
    name: str,
    collective: Linear,
    x: Tensor,
    async_op: bool,
    then: Callable[[Tensor], Any] = identity,
) -> Any:
    """Run a collective and return `then(result)`, or start it and return a handle."""
    if async_op:
        # `then` runs at wait(), outside of the autograd node, as in the synchronous case below.
        return Pending(name, StartedLinear(collective, x), then)
    return then(apply(collective, x))


class Ready:
    """What needs no communication, as something that can be waited for."""

    __slots__ = ("_result",)

    def __init__(self, result: Any) -> None:
        self._result = result

    def finish(self) -> Any:
        """Return the result."""
        return self._result


def ready(name: str, result: Any, async_op: bool) -> Any:
    """Return a result that is there already, as a handle where one was asked for."""
    return Pending(name, Ready(result), identity) if async_op else result
