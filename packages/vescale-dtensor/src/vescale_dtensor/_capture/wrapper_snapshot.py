"""DTensors from outside while a function is recorded: what uses leave on them.

A use of a DTensor leaves things on its wrapper for later uses: faces, what it was redistributed to.
Those that an argument brought belong to the program, as arguments of it. What a recording leaves on
wrappers from outside is taken off again: it belongs to one call, and the next starts without.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from vescale_dtensor._autograd.redistribution_cache import Remembered, forget
from vescale_dtensor._autograd.uses import Faces
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._tensor.dtensor import DTensor

_Was = tuple[DTensor, "Faces | None", "Remembered | None", Spec]


class Outside:
    """The wrappers from outside that a recording has met, put back when it ends."""

    def __init__(self) -> None:
        self._met: dict[int, _Was] = {}

    def argument(self, wrapper: DTensor) -> None:
        """Meet an argument, which may bring what earlier uses left on it."""
        if id(wrapper) not in self._met:
            was = wrapper, wrapper._faces, wrapper._remembered, wrapper._spec
            self._met[id(wrapper)] = was

    def held(self, wrapper: DTensor) -> None:
        """Meet any other wrapper, which starts as if it had not been used."""
        if id(wrapper) not in self._met:
            forget(wrapper)
            self.argument(wrapper)

    def __enter__(self) -> Outside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        """Take off what the recording left."""
        for wrapper, faces, remembered, spec in self._met.values():
            wrapper._faces = faces
            if wrapper._spec.itself is spec.itself:  # it may have been given other data
                wrapper._remembered, wrapper._spec = remembered, spec
            elif wrapper._remembered is not None:
                forget(wrapper)
        self._met.clear()


def brought(wrapper: DTensor) -> tuple[Faces | None, DTensor | None]:
    """What earlier uses left on a wrapper that is still good: its faces, its remembered result."""
    local = wrapper._local_tensor
    faces = wrapper._faces
    if faces is not None and not faces.current(local):
        faces = None
    known = wrapper._remembered
    if known is None:
        return faces, None
    if not known.holds(local):
        forget(wrapper)  # as its next use would
        return faces, None
    return faces, known.result
