"""Writes the Trace Event format, which Perfetto and chrome://tracing read."""

import json
from collections.abc import Sequence
from pathlib import Path

from vescale_comm._trace.record import Record

Event = dict[str, object]


def events(records: Sequence[Record], rank: int, clock: tuple[int, int]) -> list[Event]:
    """Return records as complete events, times in microseconds on rank 0's clock.

    Source: "Trace Event Format", Google, the document that chrome://tracing refers to.

    Args:
        records: of one rank.
        rank: that rank.
        clock: (its clock, rank 0's) at one moment, in ns.
    """
    ours, theirs = clock
    name: Event = {
        "ph": "M",
        "name": "process_name",
        "pid": rank,
        "args": {"name": f"rank {rank}"},
    }
    return [name, *(_event(record, rank, theirs - ours) for record in records)]


def _event(record: Record, rank: int, shift: int) -> Event:
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
            "device": record.device,
            "time": "of the launch" if record.times_launch else "until it was done",
        },
    }


def save(path: str | Path, found: Sequence[Event]) -> None:
    """Write events as one JSON document."""
    Path(path).write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": list(found)}))
