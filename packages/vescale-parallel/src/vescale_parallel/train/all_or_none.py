"""Something that may fail on some ranks only, as reading a file: all ranks go on, or all raise."""

from collections.abc import Callable
from typing import Final, TypeVar

import torch

from vescale_parallel._agreement import gather, several_ranks
from vescale_parallel._errors import ParallelError, TrainError

T = TypeVar("T")

_TEXT_BYTES: Final = 2048


def all_or_none(action: Callable[[], T], device_type: str = "cpu") -> T:
    """Do it on every rank; if it fails on any, raise on all.

    Raises:
        ParallelError: the error of this rank where it failed, else that of the first that did.
    """
    failure: ParallelError | None = None
    result: list[T] = []
    try:
        result.append(action())
    except ParallelError as error:
        failure = error
    except OSError as error:
        failure = TrainError(str(error))
    # Also the ranks that failed come here: a rank that raised at once would leave others waiting.
    texts = _exchange("" if failure is None else str(failure) or "failed", device_type)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text:
            raise TrainError(f"rank {rank} reports: {text}")
    return result[0]


def _exchange(text: str, device_type: str) -> list[str]:
    """Every rank's text, in rank order; of fixed size, so that one collective is enough."""
    if not several_ranks():
        return [text]
    mine = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device_type)
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="ignore") for one in gather(sent)]
