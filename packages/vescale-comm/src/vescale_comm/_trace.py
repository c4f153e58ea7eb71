"""A record of every collective that this package issues while a trace is open."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

import torch

from vescale_comm._group import Group


@dataclass(frozen=True, slots=True)
class Record:
    """One collective, as this rank issued it.

    Attributes:
        op: `"all_reduce"`, `"all_gather"`, `"reduce_scatter"`, `"all_to_all"`, `"broadcast"`,
            `"reduce"` (only as the gradient of a broadcast) or `"barrier"`.
        group: short name of the group: its axes, else its ranks.
        axes: names of the mesh axes that the group flattens; empty without a mesh.
        ranks: global ranks of the members.
        bytes: bytes that this rank sends (see `trace`).
        shape: shape of this rank's input; the flat buffer's for all_to_all and gather_pieces.
        dtype: dtype of this rank's input.
    """

    op: str
    group: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(slots=True, eq=False)
class Trace:
    """The collectives seen so far, in the order in which they were issued."""

    records: list[Record] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Number of collectives by op."""
        return dict(Counter(record.op for record in self.records))

    def bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(record.bytes for record in self.records)


_lock = Lock()
# The open traces of the process. Not a context variable: those do not reach the threads in which
# autograd runs the backward of a CUDA device.
_open: list[Trace] = []


@contextmanager
def trace() -> Iterator[Trace]:
    """Records every collective that this package issues in this process, in backward too.

    Traces nest, and each sees everything issued while it is open, from any thread. A group of one
    member communicates nothing, so nothing is recorded.

    Bytes are those that one member *sends*, with k members and n the bytes on the wire of the
    member's own input:

    - all_reduce: 2 n (k - 1) / k, rounded down (reduce-scatter, then all-gather);
    - all_gather: (k - 1) n, the member's own piece to every other member;
    - reduce_scatter, all_to_all: n without the part that stays;
    - broadcast: (k - 1) n at the source, 0 elsewhere; reduce: n everywhere but at the destination;
    - a reduction that the backend lacks is a gather and a local fold, and is counted as one.

    Summed over the members this is what crosses the wire, whichever algorithm a backend uses.
    """
    opened = Trace()
    with _lock:
        _open.append(opened)
    try:
        yield opened
    finally:
        with _lock:
            _open.remove(opened)


def record(
    op: str, group: Group, size: int, shape: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    """Adds one collective to the open traces; costs one test when there is none."""
    if not _open:
        return
    seen = Record(op, group.name, group.axes, group.ranks, size, shape, dtype)
    for each in tuple(_open):
        each.records.append(seen)
