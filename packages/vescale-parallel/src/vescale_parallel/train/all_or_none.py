"""Runs what may fail on some ranks only, as reading a file: all ranks go on, or all raise."""

from collections.abc import Callable
from typing import TypeVar

from vescale_comm.agreement import gather_failures

from vescale_parallel._errors import ParallelError, TrainError

T = TypeVar("T")


def all_or_none(action: Callable[[], T]) -> T:
    """Do it on every rank; if it fails on any, raise on all.

    Raises:
        ParallelError: the error of this rank where it failed, else that of the first that did.
    """
    # Only what files and options cause may differ over ranks; anything else is a bug, and raises
    # where it is.
    failure: ParallelError | None = None
    result: list[T] = []
    try:
        result.append(action())
    except ParallelError as error:
        failure = error
    except OSError as error:
        failure = TrainError(str(error))
    # Also the ranks that failed come here: a rank that raised at once would leave others waiting.
    failed = gather_failures(failure)
    if not failed:
        return result[0]
    first, words = next(iter(failed.items()))
    raise failure or TrainError(f"rank {first} reports: {words}")
