"""A trace as text."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from vescale_comm._trace.record import Record
from vescale_comm._trace.unrecorded_calls import in_words


def table(records: Sequence[Record], unrecorded: Mapping[str, int]) -> str:
    """Return count, bytes and milliseconds by op and group, largest first; and what is missing."""
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0])
    for record in records:
        row = rows[record.op, record.group]
        row[0] += 1
        row[1] += record.bytes
        row[2] += max(record.end - record.start, 0) / 1e6
    lines = [f"{'op':16s} {'group':16s} {'count':>7s} {'bytes':>14s} {'ms':>10s}"]
    for (op, group), (count, size, spent) in sorted(rows.items(), key=lambda row: -row[1][1]):
        lines.append(f"{op:16s} {group:16s} {count:7.0f} {size:14,.0f} {spent:10.3f}")
    if any(record.times_launch for record in records):
        lines.append(
            "ms on an accelerator, and of torch's own: until the collective was launched, "
            "not until it was done"
        )
    if unrecorded:
        lines.append(f"not recorded, as not this package's: {in_words(unrecorded)}")
    return "\n".join(lines)
