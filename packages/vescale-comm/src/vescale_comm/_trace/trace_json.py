"""What a trace looks like: to Perfetto, and as a table."""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from vescale_comm._trace.trace import Record, Trace

_ROUNDS = 5


def events(trace: "Trace") -> list[dict[str, object]]:
    """Returns the records as complete events, times in microseconds on rank 0's clock.

    Source: "Trace Event Format", Google, the document that chrome://tracing refers to.
    """
    ours, theirs = trace.clock
    names: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": _rank(trace)}}
    ]
    return names + [_event(record, trace.rank, theirs - ours) for record in trace.records]


def _rank(trace: "Trace") -> str:
    return f"rank {trace.rank}"


def _event(record: "Record", rank: int, shift: int) -> dict[str, object]:
    end = record.end or record.start  # never waited for: as long as nothing
    return {
        "ph": "X",
        "name": record.op,
        "cat": record.group,
        "pid": rank,
        "tid": record.group,
        "ts": (record.start + shift) / 1000,
        "dur": (end - record.start) / 1000,
        "args": {
            "bytes": record.bytes,
            "shape": list(record.shape),
            "dtype": str(record.dtype),
            "ranks": list(record.ranks),
            "line": record.site,
        },
    }


def save(path: str | Path, traces: "Sequence[Trace]") -> None:
    """Writes the events of traces as one JSON document."""
    document = {
        "displayTimeUnit": "ns",
        "traceEvents": [event for trace in traces for event in events(trace)],
    }
    Path(path).write_text(json.dumps(document))


def table(trace: "Trace") -> str:
    """Returns count, bytes and milliseconds by op and group, largest first."""
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0])
    for record in trace.records:
        row = rows[record.op, record.group]
        row[0] += 1
        row[1] += record.bytes
        row[2] += max(record.end - record.start, 0) / 1e6
    lines = [f"{'op':16s} {'group':16s} {'count':>7s} {'bytes':>14s} {'ms':>10s}"]
    for (op, group), (count, size, spent) in sorted(rows.items(), key=lambda row: -row[1][1]):
        lines.append(f"{op:16s} {group:16s} {count:7.0f} {size:14,.0f} {spent:10.3f}")
    return "\n".join(lines)


def aligned_clock() -> tuple[int, int]:
    """Returns this rank's clock and rank 0's, in ns, at one moment of the default process group.

    Rank 0 sends its time some rounds; the message that was fastest is off by least.
    """
    best: tuple[int, int] | None = None
    for _ in range(_ROUNDS):
        dist.barrier()
        sent = torch.tensor([time.time_ns()], dtype=torch.int64)
        dist.broadcast(sent, 0)
        pair = (time.time_ns(), int(sent.item()))
        if best is None or pair[0] - pair[1] < best[0] - best[1]:
            best = pair
    assert best is not None
    return (best[1], best[1]) if dist.get_rank() == 0 else best
