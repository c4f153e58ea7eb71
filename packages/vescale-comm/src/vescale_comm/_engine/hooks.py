"""Hooks around every collective of this process, for traces, checks and faults.

One list, tested once per collective, and usually empty. Not a context variable: those do not reach
the threads in which autograd runs the backward of a CUDA device. `simulate` swaps the contents of
the list when it switches ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from vescale_comm._engine.primitives import Primitive
from vescale_comm._engine.waitable import Waitable

Proceed = Callable[[], Waitable | None]
Hook = Callable[[Primitive, Proceed], Waitable | None]
"""Called instead of the primitive; `proceed` runs it, or the next hook."""

hooks: list[Hook] = []
_lock = Lock()


@contextmanager
def with_hook(hook: Hook, *, innermost: bool = False) -> Iterator[None]:
    """Add a hook while the body runs; later ones are called first, unless innermost."""
    with _lock:
        # In place: other modules, and the state of simulated ranks, hold this very list.
        hooks.insert(0 if innermost else len(hooks), hook)
    try:
        yield
    finally:
        with _lock:
            # Searched for: blocks of several threads need not end in the order in which they
            # began.
            for index, each in enumerate(hooks):
                if each is hook:
                    del hooks[index]
                    break


def through_hooks(primitive: Primitive, launch: Proceed) -> Waitable | None:
    """Run a primitive as the hooks will have it."""
    proceed = launch
    # A copy: a hook may be removed by another thread while this call is under way.
    for hook in tuple(hooks):
        proceed = _bound(hook, primitive, proceed)
    return proceed()


def _bound(hook: Hook, primitive: Primitive, proceed: Proceed) -> Proceed:
    return lambda: hook(primitive, proceed)
