"""Something that may fail on some ranks only, as reading a file: all ranks go on, or all raise."""

from collections.abc import Callable
from typing import TypeVar

from vescale_parallel._common.agreement import broadcast_text, gather_flags, several_ranks
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
    failed = gather_flags(failure is not None)
    if not any(failed):
        return result[0]
    first = failed.index(True)
    text = broadcast_text(str(failure) or "failed", first) if several_ranks() else ""
    raise failure or TrainError(f"rank {first} reports: {text}")
