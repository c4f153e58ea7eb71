"""The one method that every collective under way has, whether torch or a simulation carries it."""

from typing import Protocol


class Waitable(Protocol):
    """What is under way: torch's Work, or several of them."""

    def wait(self) -> object:
        """Return when it is complete."""
