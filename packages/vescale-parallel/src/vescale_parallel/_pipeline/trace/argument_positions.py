"""Remembers where in a block's arguments the tensors are that pass between stages.

Forwards of one kind call the first block of a stage alike. So what one of them found by walking
through nestings and comparing paths, the next ones look for at the same positions. Whatever differs
is looked at closely again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vescale_parallel._pipeline.trace.foreign_values import ForeignValues


class SameArguments:
    """What was found in a forward of a stage, for later ones.

    Args:
        foreign: marks values of other stages.
    """

    def __init__(self, foreign: ForeignValues) -> None:
        self._foreign = foreign
        # Positions of what the stage lacks, and their paths.
        self._lacking: tuple[tuple[int, ...], list[str]] | None = None
        # Types of the arguments that were handed over, and the position of each path.
        self._handed: tuple[tuple[type, ...], dict[str, int]] | None = None

    def note_lacking(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], paths: list[str]
    ) -> None:
        """Note of which arguments values have to come from the stage before."""
        places = None if kwargs else self._foreign.unknown_at(args)
        self._lacking = None if places is None or len(places) != len(paths) else (places, paths)

    def lacking(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], list[str]] | None:
        """Positions and paths of what has to come; None: it has to be looked for."""
        if self._lacking is None or kwargs or self._foreign.unknown_at(args) != self._lacking[0]:
            return None
        return self._lacking

    def note_handed(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], paths: Sequence[str]
    ) -> None:
        """Note where the tensors of these paths are, if all arguments are tensors and numbers."""
        places = [at for at, one in enumerate(args) if isinstance(one, Tensor)]
        is_flat = not kwargs and self._foreign.unknown_at(args) == () and len(places) == len(paths)
        pairs = dict(zip(paths, places, strict=False))
        self._handed = (tuple(map(type, args)), pairs) if is_flat else None

    def handed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The tensors by their paths; None: they have to be looked for."""
        if self._handed is None or kwargs or self._foreign.unknown_at(args) != ():
            return None
        types, places = self._handed
        if tuple(map(type, args)) != types:
            return None
        return {path: args[at] for path, at in places.items()}
