"""Run a collective: the only place where its primitives reach torch.distributed.

Hooks (traces, checks, faults) wrap each call here, and errors of a backend become ours.
"""

from typing import Any, TypeVar

from torch import Tensor

from vescale_comm._engine.annotated_groups import AnnotatedGroup
from vescale_comm._engine.failures import failure
from vescale_comm._engine.functional import functional
from vescale_comm._engine.hooks import hooks, through_hooks
from vescale_comm._engine.log_events import record_event
from vescale_comm._engine.primitives import Primitive, Steps
from vescale_comm._engine.waitable import Waitable
from vescale_comm._torch.compat import being_traced
from vescale_comm._torch.own_calls import own_calls

Result = TypeVar("Result")


def complete(steps: Steps[Result], *, in_graph: bool = False) -> Result:
    """Run a collective to its end.

    Args:
        steps: of the collective.
        in_graph: see `Primitive`; compared where calls are.
    """
    return _rest(steps, None, in_graph)


# `Any` and no `cast` here and below: that is a call, of each collective.
def _rest(steps: Steps[Result], arrived: Any, in_graph: bool) -> Result:
    """Run what is left of a collective, of which the last primitive returned `arrived`."""
    try:
        while True:
            # The first send takes None: that is how a generator begins.
            primitive = steps.send(arrived)
            primitive.in_graph = in_graph
            if being_traced(primitive.x):
                arrived = functional(primitive)
            else:
                _perform(primitive, async_op=False)
                arrived = primitive.written()
    except StopIteration as stop:
        result: Result = stop.value
        return result


class StartedCollective:
    """A collective of which the first primitive is under way."""

    __slots__ = ("_arrived", "_in_graph", "_primitive", "_result", "_steps", "_work")

    def __init__(self, steps: Steps[Any], *, in_graph: bool = False) -> None:
        self._steps, self._in_graph = steps, in_graph
        self._primitive: Primitive | None = None
        self._work: Waitable | None = None
        self._arrived: list[Tensor] = []
        try:
            # Up to its first primitive only: what follows needs its result.
            self._primitive = next(steps)
        except StopIteration as stop:  # nothing to send
            self._result = stop.value
            return
        self._primitive.in_graph = in_graph
        # In a graph the order of the calls means nothing: its compiler moves the waiting.
        if being_traced(self._primitive.x):
            self._arrived = functional(self._primitive)
        else:
            self._work = _perform(self._primitive, async_op=True)
            self._arrived = self._primitive.written()

    def finish(self) -> Any:
        """Wait for it, run what is left of it, and return the result."""
        primitive = self._primitive
        if primitive is None:
            return self._result
        try:
            if self._work is not None:
                self._work.wait()
        except (RuntimeError, ValueError) as error:
            raise failure(primitive, error) from error
        # What follows the first movement is not overlapped: it needs what has just arrived.
        return _rest(self._steps, self._arrived, self._in_graph)


def _perform(primitive: Primitive, *, async_op: bool) -> Waitable | None:
    if hooks:
        # Said to the hooks only, which have to know whether a wait follows.
        primitive.later = async_op
        return through_hooks(primitive, lambda: _launch_counted(primitive, async_op))
    return _launch(primitive, async_op)


def _launch_counted(primitive: Primitive, async_op: bool) -> Waitable | None:
    # Within the hooks, which may send something of their own.
    with own_calls(primitive.group.process_group):
        return _launch(primitive, async_op)


def _launch(primitive: Primitive, async_op: bool) -> Waitable | None:
    log = primitive.group._log
    if log is not None:
        # After the hooks: what a check of theirs refuses has not been executed.
        record_event(log, primitive, together=not async_op)
    process_group: Any = primitive.group.process_group
    annotated: Any = process_group
    work: Waitable | None
    try:
        if isinstance(process_group, AnnotatedGroup):
            # For this one call: a simulation compares more than torch tells a process group.
            with process_group.annotated(primitive.common(), in_graph=primitive.in_graph):
                work = primitive.launch(annotated, async_op)
                return work
        work = primitive.launch(process_group, async_op)
        return work
    except (RuntimeError, ValueError) as error:
        raise failure(primitive, error) from error
