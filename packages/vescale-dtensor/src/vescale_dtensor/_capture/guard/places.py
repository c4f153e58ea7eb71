"""Finds how code reaches what it reads, and which state of tensors is not the user's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from vescale_dtensor._tensor.dtensor import DTensor

# An object of its own: None may be what a place holds.
MISSING: Any = object()
# Some are written at each use: if they counted as the user's state, no program would stand for a
# second call.
OF_TENSORS = frozenset({*DTensor.__annotations__, "_is_param"})
"""Attributes of tensors that are none of the user's."""


class Origin(NamedTuple):
    """How code reaches a value: for messages.

    Attributes:
        parent: how it reaches what holds the value; None for what code names itself.
        text: the last part.
        name: the name in it, which `unguarded` may list.
    """

    parent: Origin | None
    text: str
    name: str

    def __str__(self) -> str:
        return f"{self.parent or ''}{self.text}"

    def names(self) -> Iterator[str]:
        """The names on the way, the last one first."""
        yield self.name
        if self.parent is not None:
            yield from self.parent.names()
