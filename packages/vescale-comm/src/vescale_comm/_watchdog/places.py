"""Finds where the threads of this process are, and which of them wait in a collective.

The stacks are read from outside, so that a collective costs nothing for being watched, and those of
torch and of other packages are watched as well.
"""

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist

from vescale_comm._torch.call_site import is_inside
from vescale_comm._torch.compat import sequence_number

# Code that communicates. Its innermost frame blocks in C++, and has none of its own.
_COMMUNICATES = ("torch.distributed.", "vescale_comm.")
# Code of other packages that waits by looking at a store again and again: it moves, and uses
# processor time, without any progress.
_POLLS = ("vescale_ckpt._coordination.",)
# Functions of decorators, which stand around what the user called.
DECORATORS = frozenset({"wrapper", "inner", "<lambda>"})
# Functions of torch.distributed in which ranks wait for each other to make a group.
_MAKES_GROUPS = frozenset({"new_group", "new_subgroups", "split_group", "init_device_mesh"})
# Waits by design: for a test process, or for answers about a failure.
_EXCEPT = ("vescale_comm.testing.", "vescale_comm._watchdog.")
# Of a comparison, in which a rank waits for the others ahead of a collective that is new to it.
_COMPARES, _MEETS = "vescale_comm._watchdog.comparison", frozenset({"meet", "agree"})
# A thread that waits uses no processor time at all; a step of training uses more than this.
_PROGRESS_SECONDS = 0.001

Position = tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective that a thread is in.

    Attributes:
        op: its name.
        ranks: global ranks of its group; empty where that cannot be seen.
        number: how many collectives the group has had; None where torch does not count.
        shape: dtype and shape of the tensor; empty if there is none.
        site: "file:line in function" of the user's call.
    """

    op: str
    ranks: tuple[int, ...]
    number: int | None
    shape: str
    site: str


@dataclass(frozen=True, slots=True)
class _ThreadSample:
    """What one look at a thread has seen.

    Attributes:
        here: where it is, as far as it stands still there.
        call: where the program called what it is in.
        polls: whether it looks at a store again and again, which uses processor time.
        spent: seconds of processor time; 0 where it polls.
        since: when it was first seen there.
    """

    here: Position
    call: Position
    polls: bool
    spent: float
    since: float

    def is_same(self, other: "_ThreadSample") -> bool:
        """Whether a thread that was `other` before has made no progress since."""
        if self.polls != other.polls:
            # First in the comparison, then in the collective itself; otherwise it has gone on.
            return other.polls and self.call == other.call
        return self.here == other.here and self.spent - other.spent < _PROGRESS_SECONDS


class Tracker:
    """Tells since when threads have been in the same collective."""

    def __init__(self) -> None:
        self._seen: dict[int, _ThreadSample] = {}

    def update(self, now: float) -> dict[int, float]:
        """Look at all threads; return since when each one that communicates has made no progress.

        Args:
            now: time of `time.monotonic`.

        Returns:
            Start of the wait by thread; at most one interval between two looks too late.
        """
        before, self._seen = self._seen, {}
        for thread, frame in sys._current_frames().items():
            if communicates(frame):
                look, there = _look(thread, frame, now), before.get(thread)
                same = there is not None and look.is_same(there)
                self._seen[thread] = replace(look, since=there.since) if there and same else look
        return {thread: look.since for thread, look in self._seen.items()}


def _look(thread: int, frame: FrameType, now: float) -> _ThreadSample:
    call, compares = _call(frame), _comparison(frame)
    if compares is not None:
        # Another event is progress, though it is compared at the same line.
        event = compares.f_code, compares.f_locals.get("count", 0)
        return _ThreadSample((event, *position(compares)), call, True, 0.0, now)
    if _module(frame).startswith(_POLLS):
        return _ThreadSample(position(_caller(frame)), call, True, 0.0, now)
    return _ThreadSample(position(frame), call, False, _processor_seconds(thread), now)


def communicates(frame: FrameType) -> bool:
    """Return whether a thread whose innermost frame this is may be waiting for other ranks."""
    name = _module(frame)
    if name.startswith(_EXCEPT):
        return _comparison(frame) is not None
    if name.startswith(_POLLS):
        return _asks(frame)
    return name.startswith(_COMMUNICATES)


def _comparison(frame: FrameType) -> FrameType | None:
    """Return the function in which the program compares what is new; None if it does not."""
    for each in _outwards(frame):
        if _module(each) == _COMPARES and each.f_code.co_name in _MEETS:
            return each
        if not _module(each).startswith(_EXCEPT) and _module(each) not in sys.stdlib_module_names:
            return None
    return None


def position(frame: FrameType) -> Position:
    """Return every function of a stack with the instruction that it is at."""
    # The code and not the frame: a frame would keep its tensors alive until the next look.
    return tuple((each.f_code, each.f_lasti) for each in _outwards(frame))


def is_users(frame: FrameType) -> bool:
    """Return whether the user wrote this function."""
    # Not the packages above this one either, nor Python's decorators around them: nobody wrote
    # what a tensor does by itself.
    name = _module(frame)
    ours = name.startswith("vescale_") or name.partition(".")[0] in sys.stdlib_module_names
    return not is_inside(frame.f_code) and not ours


def site_of(frame: FrameType) -> str:
    """Return "file:line in function" of the innermost frame that the user wrote."""
    frames = [*_outwards(frame)]
    users = [each for each in frames if is_users(each)]
    found = users[0] if users else frames[-1]
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}"


def wait_of(frame: FrameType) -> Wait:
    """Describe the collective that a stack is in."""
    inner = []
    for each in _outwards(frame):
        if is_users(each):
            break
        inner.append(each)
    for each in inner:
        primitive = each.f_locals.get("primitive")
        if primitive is not None:
            return _made(primitive.op, primitive.group, primitive.x, frame)
    # The outermost function of torch.distributed, or of this package, is what the user called.
    called = [each for each in inner if communicates(each) and "group" in each.f_code.co_varnames]
    named = [each for each in inner if each.f_code.co_name not in DECORATORS]
    at = called[-1] if called else named[-1] if named else frame
    values = at.f_locals
    tensor = values.get("x", values.get("tensor", values.get("input")))
    return _made(at.f_code.co_name.removeprefix("fast_"), values.get("group"), tensor, frame)


def makes_a_group(frame: FrameType) -> bool:
    """Return whether a stack is in torch's making of a process group, or of a mesh with some.

    Such a wait has torch's default timeout, whatever groups that exist have; except where the call
    itself gives one.
    """
    for each in _outwards(frame):
        if is_users(each):
            return False
        module, name = _module(each), each.f_code.co_name
        if module.startswith("torch.distributed.") and name in _MAKES_GROUPS:
            return each.f_locals.get("timeout") is None
        if module == "torch.distributed.device_mesh" and name == "__init__":
            return True
    return False


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread that still runs."""
    return sys._current_frames().get(thread)


def main_thread() -> int:
    """Return the thread that runs the user's program."""
    found = threading.main_thread().ident
    assert found is not None
    return found


def _made(op: str, group: Any, x: Any, frame: FrameType) -> Wait:
    process_group = getattr(group, "process_group", group)
    if process_group is None and dist.is_initialized():
        process_group = dist.group.WORLD
    ranks: tuple[int, ...] = ()
    if isinstance(process_group, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(process_group))
    shape = f"{x.dtype} {tuple(x.shape)}" if hasattr(x, "shape") and hasattr(x, "dtype") else ""
    return Wait(op, ranks, sequence_number(process_group), shape, site_of(frame))


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    each: FrameType | None = frame
    while each is not None:
        yield each
        each = each.f_back


def _caller(frame: FrameType) -> FrameType:
    """Return the frame that called for the one that polls: it stays where it is."""
    outer = [each for each in _outwards(frame) if not _module(each).startswith(_POLLS)]
    return outer[0] if outer else frame


def _asks(frame: FrameType) -> bool:
    """Whether somebody has called what polls; a thread of its own that serves calls is idle."""
    names = [_module(each) for each in _outwards(frame)]
    outer = [name for name in names if not name.startswith(_POLLS)]
    return any(name.partition(".")[0] not in sys.stdlib_module_names for name in outer)


def _call(frame: FrameType) -> Position:
    users = next((each for each in _outwards(frame) if is_users(each)), frame)
    return position(users)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _processor_seconds(thread: int) -> float:
    # Of the main thread only: asking for the clock of a thread that has just ended is a crash.
    if thread != main_thread() or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
