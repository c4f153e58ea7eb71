"""Counts this package's own calls of process groups: no trace records the others.

Process groups count their calls, whoever makes them, in whatever thread. What this package launches
is counted beside that while a trace is open; the difference is torch's own (FSDP2, DDP, DTensor,
compiled graphs, `torch.distributed` called by the program).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from vescale_comm._torch.compat import calls_of

# Weak: a process group that is destroyed while a trace is open must not be kept alive by it.
Calls = WeakKeyDictionary[ProcessGroup, int]

# Of each open trace, what was launched since it began; usually there is none. Ranks of a simulation
# share the list: their process groups are different ones.
_open: list[Calls] = []
_of_thread = local()


@contextmanager
def counting_own_calls() -> Iterator[Calls]:
    """Count by process group, while entered, what this package launches."""
    calls: Calls = WeakKeyDictionary()
    _open.append(calls)
    try:
        yield calls
    finally:
        # By identity: two traces that have seen nothing are equal.
        _open[:] = [each for each in _open if each is not calls]


@contextmanager
def own_calls(process_group: ProcessGroup) -> Iterator[None]:
    """Count what the block launches as this package's own."""
    # Within another block it is counted there.
    if not _open or is_own_call():
        yield
        return
    _of_thread.is_own = True
    try:
        with counted_in(_open, process_group):
            yield
    finally:
        _of_thread.is_own = False


def is_own_call() -> bool:
    """Return whether this thread is in a block of `own_calls`."""
    return getattr(_of_thread, "is_own", False)


@contextmanager
def counted_in(counts: Sequence[Calls], process_group: ProcessGroup) -> Iterator[None]:
    """Add to each of the counts what the block launches."""
    counts, before = tuple(counts), calls_of(process_group)
    try:
        yield
    finally:
        if before is not None:
            made = (calls_of(process_group) or 0) - before
            for calls in counts:
                calls[process_group] = calls.get(process_group, 0) + made
