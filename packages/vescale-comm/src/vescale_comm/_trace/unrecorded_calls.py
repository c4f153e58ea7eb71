"""Collectives that ran while a trace was open and that it does not record: torch's own."""

import warnings
from collections import Counter
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from vescale_comm._groups.group import ranks_of
from vescale_comm._torch.compat import calls_of, process_groups
from vescale_comm._torch.own_calls import Calls
from vescale_comm._torch.ranks import compact


def calls_so_far() -> Calls:
    """Return how many calls each process group with several members has had, where torch says."""
    found: Calls = WeakKeyDictionary()
    for process_group in process_groups():
        calls = calls_of(process_group)
        if calls is not None and len(ranks_of(process_group)) > 1:
            found[process_group] = calls
    return found


def unrecorded(before: Calls, own: Calls) -> dict[str, int]:
    """Return how many collectives others have launched since, by the ranks of the group.

    Args:
        before: `calls_so_far`, when the trace began.
        own: what this package has launched since then, and what else was recorded.
    """
    found: Counter[str] = Counter()
    for process_group, calls in calls_so_far().items():
        # A group that was made meanwhile has begun at zero.
        others = calls - before.get(process_group, 0) - own.get(process_group, 0)
        if others > 0:
            found[f"ranks {compact(ranks_of(process_group))}"] += others
    return dict(found)


def in_words(unrecorded: Mapping[str, int]) -> str:
    """Return how many were not recorded, and over which ranks."""
    return ", ".join(f"{count} over {ranks}" for ranks, count in unrecorded.items())


# By whether torch's own are recorded.
_WHERE = {
    False: "trace(torch=True) records those of torch.distributed",
    True: "torch.profiler shows what does not pass torch's dispatcher in this thread",
}


def warn_of(unrecorded: Mapping[str, int], *, with_torch: bool, stacklevel: int) -> None:
    """Warn that a trace lacks collectives, if it does."""
    if unrecorded:
        warnings.warn(
            f"trace: collectives that are not this package's ran as well ({in_words(unrecorded)}), "
            "and are in no record: counts() and bytes() are without them. torch's FSDP2, DDP and "
            f"DTensor make such calls, and compiled graphs do. {_WHERE[with_torch]}",
            stacklevel=stacklevel + 1,
        )
