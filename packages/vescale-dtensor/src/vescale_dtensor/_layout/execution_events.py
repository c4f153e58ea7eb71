"""Records what the ranks of a mesh execute together as events of the execution log.

Events are what every rank of a mesh does or none may: a redistribution that communicates, the start
of a backward, some of the random draws. What a rank does alone (`if rank == 0: log(loss * 100)`) is
none. It would matter only where it flows into an event, and that the event itself tells: it holds
the lineage of its tensor (see `_tensor/lineage.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import vescale_rng
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import ExecutionLog, execution_log

from vescale_dtensor._torch.compat import no_torch_function

silent: ContextVar[bool] = ContextVar("vescale_dtensor_uncompared", default=False)
"""Set where some ranks run what others do not: nothing is compared there."""

unrecorded: ContextVar[bool] = ContextVar("vescale_dtensor_unrecorded", default=False)
"""Set where a rank runs op by op what others may replay: that adds no events of this package."""

# Of so many events at first, what is looked at in windows is compared before a rank goes on; later
# within seconds: numbers that change at every step would use up what finds other drift at once.
_FIRST_EVENTS = 256
_MOST_MESHES = 256
_NUMBERS = frozenset({bool, int, float})
# By identity, since meshes compare slowly.
_logs: dict[int, tuple[weakref.ref[DeviceMesh], ExecutionLog | None]] = {}


def log_of(mesh: DeviceMesh) -> ExecutionLog | None:
    """What the ranks of a mesh execute together; None where nothing is compared."""
    known = _logs.get(id(mesh))
    if known is not None and known[0]() is mesh:
        return known[1]
    if len(_logs) >= _MOST_MESHES:
        _logs.clear()
    # torch answers these by a dozen Python calls each, so they are asked once for a mesh; last what
    # takes the two hundred calls by which torch tells a mesh's ranks.
    compared = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
    inside = compared and mesh.get_coordinate() is not None and mesh.device_type != "meta"
    with no_torch_function():
        log = execution_log(mesh.mesh.flatten().tolist()) if inside else None
    _logs[id(mesh)] = weakref.ref(mesh), log
    return log


class Sampling:
    """What a log says of itself, where there is none: nothing is looked at.

    Attributes:
        samples: see `vescale_comm.ExecutionLog`.
    """

    # A slot: every call with values looks at it, and a default on the class is found more slowly.
    __slots__ = ("samples",)

    def __init__(self) -> None:
        self.samples = False

    def say(self, what: str) -> None:
        """Nothing."""


nothing = Sampling()


def sampling_of(mesh: DeviceMesh) -> ExecutionLog | Sampling:
    """Return what tells whether numbers are looked at now: by its `samples`."""
    return log_of(mesh) or nothing


def record(mesh: DeviceMesh, what: Hashable, lineage: int = 0) -> None:
    """Add an event that every rank of the mesh comes to.

    Args:
        mesh: whose ranks do.
        what: it, in words.
        lineage: of what is communicated; compared only while more is looked at than always.

    Raises:
        CommMismatchError: the ranks have executed different things.
    """
    # `log_of` written out: every redistribution comes here.
    known = _logs.get(id(mesh))
    log = known[1] if known is not None and known[0]() is mesh else log_of(mesh)
    if log is None or silent.get() or unrecorded.get():
        return
    if not log.samples:
        lineage = 0
    elif log.count >= _FIRST_EVENTS:
        log.note(lineage, None)
        lineage = 0
    log.record(what, lineage, together=True)


def end_step(mesh: DeviceMesh) -> None:
    """Note that a backward has begun on a mesh: from one to the next is a step of the program."""
    log = log_of(mesh)
    if log is not None and not silent.get() and not unrecorded.get():
        log.end_step()


def all_say(word: str, mesh: DeviceMesh | None = None) -> bool:
    """Whether every rank says a word now: the same answer on each that asks.

    Not collective: ranks that never ask are waited for, not long, and then the answer is no.

    Args:
        word: it.
        mesh: whose ranks are asked; None: all ranks of the world.
    """
    if mesh is not None:
        log = log_of(mesh)
        return mesh.size() == 1 or (log is not None and log.all_say(word))
    log = execution_log(range(dist.get_world_size())) if dist.is_initialized() else None
    return log is not None and log.all_say(word)


def note_numbers(mesh: DeviceMesh, name: str, numbers: Mapping[str, Any]) -> None:
    """Note numbers by which every rank of the mesh computes, and that no event or call holds.

    Args:
        mesh: whose ranks do.
        name: of what they belong to.
        numbers: of one group or several, by name; what is no number is left out.
    """
    log = log_of(mesh)
    if log is None or silent.get() or unrecorded.get():
        return
    told = {key: value for key, value in numbers.items() if type(value) in _NUMBERS}
    # A NaN has a hash of its own in every process.
    value = hash(tuple([0 if each != each else each for each in told.values()]))
    log.note(value, _Numbers((name, *told.items())))


class _Numbers(tuple[Any, ...]):
    """A name and numbers, as text only when somebody reads it."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self[0]} with {', '.join(f'{key}={value!r}' for key, value in self[1:])}"


def record_draw(mesh: DeviceMesh, local: Tensor, generator: torch.Generator | None) -> None:
    """Note that random numbers are drawn for a tensor of the mesh.

    The first draws, and some of the later ones, are events with the state of the generator: it
    makes no difference which, since generators that have parted do not meet again.

    Raises:
        CommMismatchError: the ranks' generators differ.
    """
    log = log_of(mesh)
    if log is None or silent.get() or unrecorded.get() or not log.is_sample("draw"):
        return
    _record_state(mesh, _state(local, generator))


def generator_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """Return the generator among the arguments of a call; None is the default one."""
    given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator))
    return next(given, None)


def state_before(mesh: DeviceMesh, local: Tensor, generator: torch.Generator | None) -> int | None:
    """Return where a generator stands before a call of which nobody knows whether it draws.

    For `record_if_drawn` afterwards; None where nothing is compared.
    """
    if log_of(mesh) is None or silent.get() or unrecorded.get():
        return None
    return _state(local, generator)


def record_if_drawn(
    mesh: DeviceMesh, local: Tensor, generator: torch.Generator | None, before: int | None
) -> None:
    """Note as `record_draw` does that a call has drawn, if the generator stands elsewhere now.

    Raises:
        CommMismatchError: the ranks' generators differ.
    """
    log = log_of(mesh)
    if log is None or before is None or _state(local, generator) == before:
        return
    if log.is_sample("draw"):
        _record_state(mesh, before)


def _record_state(mesh: DeviceMesh, state: int | None) -> None:
    if state is not None:
        record(mesh, f"draws random numbers with a generator in state {state:016x}")


def _state(local: Tensor, generator: torch.Generator | None) -> int | None:
    if generator is None and local.is_cuda:
        generator = torch.cuda.default_generators[local.device.index or 0]
    try:
        with no_torch_function():  # no part of a program that a mode records
            return vescale_rng.streams.fingerprint(generator)
    except vescale_rng.RngError:  # captured into a graph: its state is not known here
        return None
