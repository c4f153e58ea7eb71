"""What a collective that is under way has in common with others, whoever carries it."""

from typing import Protocol


class Waitable(Protocol):
    """What is under way: torch's Work, or several of them."""

    def wait(self) -> object:
        """Return when it is complete."""
