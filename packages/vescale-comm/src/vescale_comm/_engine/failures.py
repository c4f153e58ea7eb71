"""What is said when a collective fails: which one, over which group, and who did not come."""

import time

from vescale_comm._engine.primitives import Primitive
from vescale_comm._errors import CollectiveError, CommError, CommTimeoutError
from vescale_comm._torch.call_site import call_site
from vescale_comm._torch.compat import store_of

_PREFIX = "vescale_comm"
_GRACE_SECONDS = 1.0


def failure(primitive: Primitive, error: Exception) -> Exception:
    """Say what failed, over which group, and, after a timeout, who is missing."""
    if isinstance(error, CommError):  # it has its words already
        return error
    x, group = primitive.x, primitive.group
    what = primitive.op if x is None else f"{primitive.op} of {x.dtype} {tuple(x.shape)}"
    # Backends have no exception types of their own: their text is all there is to tell by.
    text = str(error)
    where = f"{what} over {group.name} (ranks {list(group.ranks)})"
    if "timed out" in text.lower() or "timeout" in text.lower():
        return CommTimeoutError(
            f"{where} timed out: some member did not reach this call, or called something else. "
            f"{missing_members(primitive)}The backend says: {text}"
        )
    return CollectiveError(f"{where} failed. The backend says: {text}")


def missing_members(primitive: Primitive) -> str:
    """After a timeout of the backend: names the members that did not time out as well.

    Each member that did says so in the group's store; those that come late have a second.
    """
    group = primitive.group
    process_group = group.process_group
    store = store_of(process_group)
    if store is None or group.size == 1:
        return ""
    try:
        keys = [f"{_PREFIX}/waiting/{member}" for member in range(group.size)]
        store.set(keys[group.rank], f"{primitive.common()} at {call_site()}")
        deadline = time.monotonic() + _GRACE_SECONDS
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.02)
        there = [member for member, key in enumerate(keys) if store.check([key])]
        missing = [group.ranks[member] for member in range(group.size) if member not in there]
        waiting = [f"rank {group.ranks[m]} in {store.get(keys[m]).decode()}" for m in there]
    except RuntimeError:  # the store is gone as well
        return ""
    names = ", ".join(map(str, missing)) or "none"
    return f"Missing: {names}. Waiting: {'; '.join(waiting)}. "
