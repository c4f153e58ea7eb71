"""The one place where a collective reaches torch.distributed: recorded, and failing with words."""

from collections.abc import Callable
from typing import Any

import torch

from vescale_comm._errors import CollectiveError, CommTimeoutError
from vescale_comm._group import Group
from vescale_comm._trace import record


def issue(
    op: str,
    group: Group,
    sent: int,
    x: torch.Tensor | None,
    call: Callable[..., object],
    /,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Runs one torch.distributed call for the collective `op` of the input `x`.

    Args:
        op: name of the collective, for the trace and for messages.
        group: group that it runs on.
        sent: bytes that this rank sends.
        x: the member's input as the caller gave it, for the trace and for messages.
        call: function of torch.distributed; gets `args`, `kwargs` and the process group.
        *args: for `call`.
        **kwargs: for `call`.
    """
    shape = () if x is None else tuple(x.shape)
    dtype = None if x is None else x.dtype
    record(op, group, sent, shape, dtype)
    process_group = group.process_group
    try:
        call(*args, group=process_group, **kwargs)
    except (RuntimeError, ValueError) as error:
        what = op if x is None else f"{op} of {dtype} {shape}"
        raise _failure(what, group, error) from error


def _failure(what: str, group: Group, error: Exception) -> CollectiveError:
    text = str(error)
    where = f"{what} over {group.name} (ranks {list(group.ranks)})"
    if "timed out" in text.lower() or "timeout" in text.lower():
        return CommTimeoutError(
            f"{where} timed out: some member did not reach this call, or called something else. "
            f"The backend says: {text}"
        )
    return CollectiveError(f"{where} failed. The backend says: {text}")
