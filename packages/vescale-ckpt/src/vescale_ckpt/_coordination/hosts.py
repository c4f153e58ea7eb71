"""Finds the ranks that run on one machine, and the number of threads each of them may use."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_key() -> str:
    """Name this machine: equal for processes that can name each other's open files."""
    try:
        # The kernel's boot and the namespace of process numbers: two containers on one kernel
        # number their processes separately, so neither can open the other's files by number.
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        # Not Linux: a name of its own, so that this process shares with no other.
        return secrets.token_hex(8)


def have_own_processes(processes: Sequence[tuple[str, int]]) -> bool:
    """Return whether every rank, given by its host and process number, has a process of its own.

    Ranks that are threads may take turns and switch in collectives only: none of them may wait
    for another, or for a thread of its own, in any other way.
    """
    return len(set(processes)) == len(processes)


def cores_per_rank(ranks_here: int) -> int:
    """Return how many threads a rank may use without taking cores from its neighbours."""
    # The cores that this process may run on, which may be fewer than the machine has.
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(4, (available or 1) // ranks_here))
