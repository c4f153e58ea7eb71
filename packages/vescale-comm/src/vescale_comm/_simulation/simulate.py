"""`simulate()`: all ranks of a world as threads of this process, without a launcher."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vescale_comm._errors import (
    CommArgumentError,
    CommError,
    CommMismatchError,
    DeadlockError,
)
from vescale_comm._outcome import Ok, Outcome, failed
from vescale_comm._simulation.group import SimulatedGroup
from vescale_comm._simulation.log_comparison import WorldLogs
from vescale_comm._simulation.meeting import Meeting
from vescale_comm._simulation.scheduler import Scheduler
from vescale_comm._simulation.state import ProcessState
from vescale_comm._simulation.store import SimulatedStore
from vescale_comm._torch.compat import (
    can_separate_worlds,
    isolated_threads,
    separate_world,
    settle_device_guard,
)

_BACKEND = "simulated"
# One at a time: what is swapped between ranks belongs to the process.
_lock = threading.Lock()
_running: "list[_World]" = []


@dataclass(frozen=True, slots=True)
class Simulation:
    """A world of ranks that are threads of this process; made by `simulate`.

    Attributes:
        world_size: number of ranks.
    """

    world_size: int

    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """The same as `run`."""
        return self.run(fn, *args)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on every rank and return the values, by rank.

        Raises:
            SimulationError: a rank raised; its cause is what the first one raised.
        """
        values, errors = self._run(fn, args)
        if errors:
            raise _failed(fn, self.world_size, errors)
        return [values[rank] for rank in range(self.world_size)]

    def outcomes(self, fn: Callable[..., Any], *args: Any) -> list[Outcome]:
        """Like `run`, but returns for each rank either `Ok(value)` or `Failed(...)`."""
        values, errors = self._run(fn, args)
        return [
            failed(errors[rank], __file__) if rank in errors else Ok(values[rank])
            for rank in range(self.world_size)
        ]

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[dict[int, Any], dict[int, BaseException]]:
        # Not waited for: a simulation inside a simulation would wait for itself.
        if not _lock.acquire(blocking=False):
            raise CommError("a simulation is running in this process: there is one at a time")
        try:
            state = ProcessState.captured()
            # In this thread, which outlives the ranks: see there.
            settle_device_guard()
            world = _World(self.world_size)
            # How `_create`, which torch calls without a context, finds the world that is running.
            _running.append(world)
            try:
                with isolated_threads(world.identity):
                    return world.run(fn, args)
            finally:
                state.restore()
        finally:
            _running.clear()
            _lock.release()


class SimulationError(CommError):
    """A rank of a simulation raised.

    Attributes:
        errors: what was raised, by rank.
    """

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


def simulate(world_size: int) -> Simulation:
    """Make a world of which all ranks run in this process: in a notebook, in pytest, anywhere.

    `simulate(4).run(fn, *args)`, or `simulate(4)(fn, *args)`, calls `fn(rank, world_size, *args)`
    on each rank, where the default process group is there, and `torch.distributed`, `DeviceMesh`
    and this package work as they do in a process for each rank. Any function will do: a lambda, a
    closure, one of a notebook.

    Ranks are threads of which one runs at a time; they switch only where one waits for another.
    With them are swapped torch's process groups, the default generators of torch, numpy and Python
    (every rank starts with the caller's), `os.environ`, warning filters, and open traces. Other
    globals of the process, and `args`, are shared. When every rank waits, that is a deadlock, and
    each raises `DeadlockError` at once, with what each rank waits for and where; ranks that call
    different things raise `CommMismatchError`. Afterwards everything is as before.

    Native reductions are folded in rank order. Ordered ones have the bits of real processes.

    Args:
        world_size: number of ranks.

    Raises:
        CommArgumentError: a world size that is not positive.

    Examples:
        simulate(2)(lambda rank, world_size: all_reduce(torch.ones(2)))
    """
    if world_size < 1:
        raise CommArgumentError(f"simulate: world_size is {world_size}; it has to be positive")
    if not can_separate_worlds():
        raise CommError(f"torch {torch.__version__} cannot have several ranks in one process")
    return Simulation(world_size)


class _World:
    """One run: the scheduler, and where the members of each group meet."""

    def __init__(self, world_size: int) -> None:
        self.size = world_size
        self.scheduler = Scheduler(world_size)
        self.logs = WorldLogs(self.scheduler)
        self.store = SimulatedStore(self.scheduler.wait_until)
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._made: dict[tuple[str, int], int] = {}
        # New objects for every run: a mesh cached by an earlier simulation belongs to none of these
        # ranks.
        self._identities = [object() for _ in range(world_size)]

    def identity(self) -> object:
        """Return an object that stands for the running rank of this run, and for no other."""
        return self._identities[self.scheduler.current]

    def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[dict[int, Any], dict[int, BaseException]]:
        """Run `fn` on every rank; return values and errors."""
        values: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        _register()
        for rank in self.scheduler.ranks:
            # Before any thread runs: a rank must never see the caller's process groups.
            rank.state.world = separate_world()

        def _body(rank: int) -> None:
            dist.init_process_group(_BACKEND, store=self.store, rank=rank, world_size=self.size)
            try:
                # Written by the rank that has the turn: no two threads touch these dicts at once.
                values[rank] = fn(rank, self.size, *args)
            except BaseException as error:
                errors[rank] = error
                raise
            finally:
                # In the rank's own thread: the table of groups that is swapped in is this rank's.
                if dist.is_initialized():
                    dist.destroy_process_group()

        self.scheduler.run(_body)
        for rank in self.scheduler.ranks:  # what failed outside of fn
            if rank.failure is not None:
                errors.setdefault(rank.index, rank.failure)
        for index, words in self.logs.untold(errors).items():
            errors.setdefault(index, CommMismatchError(words))
        return values, errors

    def group(self, options: Any) -> SimulatedGroup:
        """Make the running rank's end of a group."""
        name, rank, size = options.group_id, options.group_rank, options.group_size
        ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        # torch reuses names after a group was destroyed; a number tells those of one name apart.
        key = (name, self.scheduler.current)
        made = self._made[key] = self._made.get(key, 0) + 1
        meeting = self._meetings.setdefault((name, made), Meeting(name, ranks))
        return SimulatedGroup(rank, size, meeting, self.scheduler, self.logs)


def _register() -> None:
    """Make the backend known to torch, which has no way to make it unknown again."""
    if _BACKEND not in dist.Backend.backend_list:
        accelerator = torch.accelerator.current_accelerator()
        others = {"cuda"} if accelerator is None else {"cuda", accelerator.type}
        devices = ["cpu", *sorted(others)]
        dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=devices)


def _create(options: Any, backend_options: Any) -> SimulatedGroup:
    if not _running:
        raise CommError("the backend 'simulated' is for functions that simulate(n).run calls")
    return _running[-1].group(options)


def _failed(
    fn: Callable[..., Any], world_size: int, errors: dict[int, BaseException]
) -> SimulationError:
    # A deadlock is mostly the consequence of what another rank raised.
    first = min(errors, key=lambda rank: (isinstance(errors[rank], DeadlockError), rank))
    name = getattr(fn, "__qualname__", repr(fn))
    lines = [f"rank {rank}: {type(e).__name__}: {e}" for rank, e in sorted(errors.items())]
    message = f"{name} raised on rank(s) {', '.join(map(str, sorted(errors)))} of {world_size}"
    error = SimulationError("\n".join([message, *lines]), errors)
    error.__cause__ = errors[first]
    return error
