"""`trace()`: a record of every collective that this package issues while it is open."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from vescale_comm._engine.hooks import Proceed, with_hook
from vescale_comm._engine.primitives import Primitive
from vescale_comm._engine.waitable import Waitable
from vescale_comm._torch.call_site import call_site
from vescale_comm._torch.own_calls import counting_own_calls
from vescale_comm._trace import perfetto
from vescale_comm._trace.clock import aligned_clock
from vescale_comm._trace.record import Record
from vescale_comm._trace.table import table
from vescale_comm._trace.torch_calls import TorchCalls
from vescale_comm._trace.unrecorded_calls import calls_so_far, unrecorded, warn_of


@dataclass(slots=True, eq=False)
class Trace:
    """The collectives seen so far, in the order in which they were issued.

    Attributes:
        records: one for each collective; one that takes two movements (an ordered or compressed
            all-reduce: exchange, then gather) has two.
        rank: global rank of this process; 0 without a process group.
        clock: (this rank's, rank 0's) clock at one moment, in ns, which `merge` aligns by.
        unrecorded: when the block has ended: how many collectives of several ranks ran in it that
            this package did not issue, by the ranks of their group. No record, count or sum of
            bytes has them.
    """

    records: list[Record] = field(default_factory=list)
    rank: int = 0
    clock: tuple[int, int] = (0, 0)
    unrecorded: dict[str, int] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Number of collectives by op."""
        return dict(Counter(record.op for record in self.records))

    def bytes(self) -> int:
        """Return bytes that this rank sent."""
        return sum(record.bytes for record in self.records)

    def bytes_by_axis(self) -> dict[str, int]:
        """Return bytes that this rank sent by group: its axes, else its ranks."""
        total: Counter[str] = Counter()
        for record in self.records:
            total[record.group] += record.bytes
        return dict(total)

    def table(self) -> str:
        """Return count, bytes and milliseconds by op and group, as text."""
        return table(self.records, self.unrecorded)

    def events(self) -> list[dict[str, object]]:
        """Return the records as events of the Trace Event format, on rank 0's clock."""
        return perfetto.events(self.records, self.rank, self.clock)

    def save(self, path: str | Path) -> None:
        """Write JSON that Perfetto (ui.perfetto.dev) and chrome://tracing show."""
        perfetto.save(path, self.events())


def merge(path: str | Path, traces: "list[Trace]") -> None:
    """Write the traces of several ranks as one JSON: a track for each rank, on rank 0's clock.

    Args:
        path: file to write.
        traces: one from each rank, collected in any way; a `Trace` is plain data.
    """
    perfetto.save(path, [event for trace in traces for event in trace.events()])


@contextmanager
def trace(*, align: bool = False, torch: bool = False) -> Iterator[Trace]:
    """Record every collective that this package issues in this process, in backward too.

    What others issue is recorded with `torch=True` only: `torch.distributed` called by the program,
    and by torch's own FSDP2 (`fsdp2.install` takes over its reductions, not its gathers), DDP,
    DTensor and pipelines. Process groups count all calls: how many have no record, those of
    compiled graphs among them, `Trace.unrecorded` and `Trace.table` say, and a warning at the end
    of the block says that there were some. gloo and NCCL count, as they carry out a call: gloo some
    calls as several, NCCL no messages between members.

    Traces nest, and each sees everything issued while it is open, from any thread. A group of one
    member communicates nothing, so nothing is recorded.

    Bytes are those that one member *sends*, with k members and n the bytes on the wire of the
    member's own input:

    - all_reduce: 2 n (k - 1) / k, rounded down (reduce-scatter, then all-gather);
    - all_gather: (k - 1) n, the member's own shard to every other member;
    - reduce_scatter, all_to_all: n without the part that stays;
    - broadcast: (k - 1) n at the source, 0 elsewhere; reduce: n everywhere but at the destination;
    - scatter, permute, send: what leaves this member;
    - a reduction that is folded here, because the backend lacks it or `order` or `wire` ask for it,
      is an exchange and a gather of the encoded parts, or up to 4096 bytes one gather, and is
      counted as that.

    Times are the host's: of a collective on an accelerator that of its launch, which `Trace.table`
    and `Trace.save` say. How long it takes there `torch.profiler` tells.

    Summed over the members this is what crosses the wire, whichever algorithm a backend uses.

    Args:
        align: whether to compare this rank's clock with rank 0's first. That is a collective of the
            default process group: all ranks, or none.
        torch: whether to record what torch issues as well, in this thread and in the backwards that
            it starts: what reaches its dispatcher, which in `simulate` are the functional ones
            only. Every operator then passes a `TorchDispatchMode`, slowly; `torch.compile` and
            CUDA graphs do under it what they do under any. `Record.of_torch` tells them apart.
    """
    opened = Trace(rank=dist.get_rank() if dist.is_initialized() else 0)
    if align:
        opened.clock = aligned_clock()
    # Innermost: it times what reaches torch, after checks and faults had their say.
    before = calls_so_far()
    with with_hook(_Watch(opened), innermost=True), counting_own_calls() as own:
        try:
            with TorchCalls(opened.records.append, own) if torch else nullcontext():
                yield opened
        finally:
            opened.unrecorded = unrecorded(before, own)
    # Not where the block has raised. As of the `with`: two more frames are contextlib's and this.
    warn_of(opened.unrecorded, with_torch=torch, stacklevel=3)


def count() -> AbstractContextManager[Trace]:
    """Return `trace()`, by a name that reads well in tests of `counts()` and `bytes()`."""
    return trace()


@dataclass(frozen=True, slots=True, eq=False)
class _Watch:
    trace: Trace

    def __call__(self, primitive: Primitive, proceed: Proceed) -> Waitable | None:
        group, x = primitive.group, primitive.x
        record = Record(
            primitive.op,
            group.name,
            group.axes,
            group.ranks,
            primitive.sent,
            () if x is None else tuple(x.shape),
            None if x is None else x.dtype,
            start=time.time_ns(),
            site=call_site(),
            device="cpu" if x is None else x.device.type,
        )
        # Before it runs: a collective that raises or never returns is in the trace, with end 0.
        self.trace.records.append(record)
        work = proceed()
        if work is not None:
            return _TimedWork(work, record)
        # Synchronous: there is no handle to wait for, so it is complete here.
        record.end = time.time_ns()
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _TimedWork:
    work: Waitable
    record: Record

    def wait(self) -> object:
        """Wait, and note when that was."""
        result = self.work.wait()
        self.record.end = time.time_ns()
        return result
