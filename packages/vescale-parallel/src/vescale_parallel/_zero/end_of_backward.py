"""Calls functions when a backward ends, also when it raised.

torch keeps the callbacks of a backward for as long as the backward lives, and drops them unasked
where it raised. So what is queued is an object that notices its own end.
"""

from __future__ import annotations

from collections.abc import Callable

from vescale_parallel._common.torch_compat import after_backward, in_backward


class EndOfBackward:
    """Watches one backward at a time.

    Attributes:
        token: of the backward that is watched; None where none is.

    Args:
        ended: called when it has ended without an error.
        failed: called when it raised, before the exception reaches whoever called `backward`. On
            devices with threads of their own, at the latest when `forget` is called.
    """

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended, self._failed = ended, failed
        self.token: object | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a backward is watched that has not ended, as far as is known."""
        return self.token is not None

    def watch(self) -> None:
        """Watch the backward that runs now, if one does and is not watched yet."""
        if self.token is None and in_backward():
            token = object()
            after_backward(_QueuedCallback(self, token))
            # Last: a torch that queues nothing drops it at once, which is no end of this backward.
            self.token = token

    def forget(self) -> None:
        """Whatever was watched is over."""
        self.token = None

    def over(self, token: object, *, raised: bool) -> None:
        """The backward with this token is over."""
        # One that was forgotten may be freed late, amid the next one.
        if self.token is token:
            self.token = None
            (self._failed if raised else self._ended)()


class _QueuedCallback:
    """What torch calls at the end of a backward, or drops."""

    def __init__(self, watcher: EndOfBackward, token: object) -> None:
        self._watcher, self._token = watcher, token

    def __call__(self) -> None:
        self._watcher.over(self._token, raised=False)

    def __del__(self) -> None:
        self._watcher.over(self._token, raised=True)
