"""Write lists of ranks for messages."""

from collections.abc import Iterable


def compact(ranks: Iterable[int]) -> str:
    """Write ranks with runs of three or more as ranges: (0, 1, 2, 5) is "0-2,5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs
    )
