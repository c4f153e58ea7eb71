"""Holds the current policy, a context variable that is read when an op is called."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vescale_rng._errors import PolicyError

_POLICIES = ("native", "portable")
_current: ContextVar[str | None] = ContextVar("vescale_rng_policy", default=None)
# The policies of all `with` blocks that are open, in any thread, in the order of their opening;
# see `_of_alien_thread`. By block and not by name: a block that ends must take out itself, and
# not another one of the same policy. Single operations on a dict need no lock.
_open: dict[object, str] = {}


def policy() -> str:
    """Return the policy in force; "native" unless `use` says otherwise."""
    return _current.get() or (_of_alien_thread() if _open else "native")


def require_native(what: str) -> None:
    """Refuse `what` unless the policy "native" is in force.

    What only one policy draws is refused under the others, never drawn in another way.

    Raises:
        PolicyError: another policy is.
    """
    if policy() != "native":
        raise PolicyError(
            f'{what} is drawn by the policy "native" only, and "{policy()}" is in force: put '
            '`with use("native"):` around this call'
        )


@contextmanager
def use(name: str) -> Iterator[None]:
    """Draw by the policy `name` inside the `with` block.

    It holds in the thread that enters the block, and in the threads in which autograd runs a
    backward that is waited for in the block: checkpointed forwards are drawn again there.

    Args:
        name: "native", the numbers of stock torch on one device, or "portable", numbers that are
            the same on every device, and whose cost is that of the local part.

    Raises:
        PolicyError: there is no such policy.
    """
    if name not in _POLICIES:
        raise PolicyError(
            f"`name`: policy {name!r:.80} was asked for, vescale-rng has "
            + " and ".join(f'"{known}"' for known in _POLICIES)
        )
    token, block = _current.set(name), object()
    _open[block] = name
    try:
        yield
    finally:
        del _open[block]
        _current.reset(token)


def _of_alien_thread() -> str:
    """Return the policy of a thread that Python did not start, which no context variable reaches.

    On CUDA such threads of autograd recompute what torch.utils.checkpoint has dropped, while the
    thread that asked for the backward waits. They draw as the block that was opened last.
    """
    alien = threading.current_thread().name.startswith("Dummy-")
    try:
        return list(_open.values())[-1] if alien else "native"
    except IndexError:  # closed by its thread a moment ago
        return "native"
