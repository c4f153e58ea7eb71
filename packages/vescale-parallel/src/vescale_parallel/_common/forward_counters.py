"""Tracks attributes that count forwards, where a call runs a forward more often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

Places = dict[tuple[int, str], dict[str, Any]]
"""Tables of attributes of modules, by their `id` and a name in them."""

_PLAIN: Final = frozenset({int, float, complex, bool, str, type(None)})
_OF_MODULES: Final = frozenset(vars(nn.Module()))
_MISSING: Final[Any] = object()


def places_of(model: nn.Module) -> Places:
    """Attributes of a model's modules that hold numbers, texts or None."""
    return {
        (id(vars(module)), name): vars(module)
        for module in model.modules()
        for name, value in vars(module).items()
        if type(value) in _PLAIN and name not in _OF_MODULES
    }


class Counts:
    """Plain values of attributes as they are when this is made."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._before = {at: table.get(at[1], _MISSING) for at, table in places.items()}

    def changed(self) -> Places:
        """Return where another value is now."""
        return {
            at: table
            for at, table in self._places.items()
            if table.get(at[1], _MISSING) is not self._before[at]
        }

    def of(self, places: Places) -> Counts:
        """Return the values of some of the places."""
        found = Counts({at: table for at, table in self._places.items() if at in places})
        found._before = {at: self._before[at] for at in found._places}
        return found

    def restore(self) -> None:
        """Let the attributes have these values."""
        for at, table in self._places.items():
            if self._before[at] is _MISSING:
                table.pop(at[1], None)
            else:
                table[at[1]] = self._before[at]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have these values within; afterwards those of now."""
        now = Counts(self._places)
        self.restore()
        try:
            yield
        finally:
            now.restore()
