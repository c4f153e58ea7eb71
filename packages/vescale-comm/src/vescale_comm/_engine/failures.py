"""Messages of collectives that fail: which one, over which group, and because of which rank."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from vescale_comm._engine.primitives import Barrier, Primitive
from vescale_comm._errors import (
    CollectiveError,
    CommError,
    CommMismatchError,
    CommTimeoutError,
    RankFailedError,
)
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.own_calls import own_calls
from vescale_comm._torch.ranks import named
from vescale_comm._watchdog.channel import Answer
from vescale_comm._watchdog.current_watcher import current
from vescale_comm._watchdog.places import site_of
from vescale_comm._watchdog.report import is_lost_connection, is_timeout, missing


def failure(primitive: Primitive, error: Exception) -> Exception:
    """Say what failed, over which group, and which rank did not come, or ended."""
    if isinstance(error, CommError):  # it has its words already
        return error
    drift = divergence()
    if drift is not None:
        return CommMismatchError(f"{_described(primitive)} failed, because {drift}")
    text = str(error)
    where, backend = _described(primitive), f"The backend says: {text}"
    if is_timeout(text):
        reason = "some member did not reach this call, or called something else."
        found, _ = _explained(primitive, "timed out", ended=False)
        return CommTimeoutError(f"{where} timed out: {reason}{found} {backend}")
    if not is_lost_connection(text):
        return CollectiveError(f"{where} failed. {backend}")
    found, known = _explained(primitive, "failed, because a member was gone", ended=True)
    if known:
        return RankFailedError(f"{where} failed, because another rank ended.{found} {backend}")
    return CollectiveError(f"{where} failed.{found} {backend}")


@contextmanager
def explained_failures(
    op: str, x: Tensor, group: GroupLike = None, *, async_op: bool = False
) -> Iterator[None]:
    """Give errors of torch.distributed in the block the type and the words of this package's own.

    For collectives that are no part of the program, such as checks, and that no trace should see.
    What is called is compared over the ranks as collectives of this package are: backends mix up,
    or abort at, calls of other sizes.

    Args:
        op: the collective, for the message.
        x: this member's input.
        group: where it is called.
        async_op: whether it is only begun, so that this one goes on before the others come.

    Raises:
        CommTimeoutError: a member did not come.
        RankFailedError: a member ended; the message says which, and why.
        CommMismatchError: the ranks have diverged.
        CollectiveError: the backend failed for another reason.

    Examples:
        with explained_failures("all_gather", own, group):
            dist.all_gather(rows, own, group=group.process_group)
    """
    where = as_group(group)
    if where._log is not None:
        together = op != "broadcast" and not async_op
        where._log.record((op, "of a check", x.dtype, x.numel()), together=together)
    with failures_in_words(op, x, where), own_calls(where.process_group):
        yield


@contextmanager
def failures_in_words(op: str, x: Tensor, where: Group) -> Iterator[None]:
    """`explained_failures` of a call that was compared as it began, and is waited for."""
    try:
        yield
    except CommError:
        raise
    except (RuntimeError, ValueError) as error:
        raise failure(Barrier(op, where, 0, x), error) from error


def divergence() -> str | None:
    """Return how the ranks have diverged, if that is known by now: the cause of the rest.

    The caller raises it.
    """
    watcher = current()
    if watcher is None or watcher.comparison is None:
        return None
    found = watcher.comparison.look()
    return None if found is None else str(watcher.comparison.error())


def _described(primitive: Primitive) -> str:
    x, group = primitive.x, primitive.group
    what = primitive.op if x is None else f"{primitive.op} of {x.dtype} {tuple(x.shape)}"
    return f"{what} over {group.name} (ranks {list(group.ranks)})"


def _explained(primitive: Primitive, failed: str, *, ended: bool) -> tuple[str, bool]:
    """Return who is missing and what the others do, and whether one is known to have ended."""
    watcher = current()
    if watcher is None:
        return "", False
    # Said to the others as well, who may be about to fail for the same reason.
    text = f"{_described(primitive)} {failed}, at {site_of(sys._getframe())}"
    # Whoever sees a member go does not wait for it any more.
    answer = Answer(text, "" if ended else primitive.op, primitive.group.ranks)
    found, state = watcher.explain(answer, ended=ended)
    late = missing(state, answer) if state.answered and not ended else []
    names = f" Missing: {named(late)}." if late else ""
    return f"{names}\n{found}\n" if found else names, state.explains()
