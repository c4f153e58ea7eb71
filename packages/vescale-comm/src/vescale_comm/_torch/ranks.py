"""Write lists of ranks for messages, and for other ranks."""

from collections.abc import Iterable, Sequence

# Runs that a message shows: of thousands of ranks, every second one may be meant.
_SHOWN_RUNS = 16
# Of words from elsewhere that would have more.
_MOST_RANKS = 1 << 22


def compact(ranks: Iterable[int]) -> str:
    """Write ranks with runs of three or more as ranges: (0, 1, 2, 5, 6) is "0-2, 5, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    left = sum(map(len, runs[_SHOWN_RUNS:]))
    shown = ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs[:_SHOWN_RUNS]
    )
    return f"{shown} and {left} more" if left else shown


def named(ranks: Sequence[int]) -> str:
    """Write ranks for a message: "rank 3", or "ranks 0-2, 5"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {compact(ranks)}"


def runs(ranks: Iterable[int]) -> list[tuple[int, int, int]]:
    """Write ranks as (first, how many, step): those along an axis of a mesh are one such run."""
    found: list[tuple[int, int, int]] = []
    for rank in ranks:
        if found:
            first, count, step = found[-1]
            step = rank - first if count == 1 else step
            if rank == first + count * step:
                found[-1] = first, count + 1, step
                continue
        found.append((rank, 1, 1))
    return found


def ranks_of_runs(written: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return what `runs` has written; raises TypeError or ValueError for anything else."""
    found: list[int] = []
    for run in written:
        if any(type(number) is not int for number in run):
            raise TypeError("no runs of ranks")
        first, count, step = run
        if not 0 <= count <= _MOST_RANKS - len(found):
            raise ValueError("more ranks than any world has")
        found += [first + at * step for at in range(count)]
    return tuple(found)
