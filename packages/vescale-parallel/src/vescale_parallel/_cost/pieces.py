"""Parameters as the cost model sees them: shapes, the axes that shard them, and their unit."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_UNIT = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True)
class Piece:
    """One parameter of one rank, before ZeRO shards it further.

    Attributes:
        shape: on one device.
        local: the largest shard.
        dims: the dim that each sharding axis divides.
        zero: its ZeRO level.
    """

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    dims: tuple[tuple[str, int], ...] = ()
    zero: int = 0

    @property
    def elements(self) -> int:
        """Elements of the shard."""
        return math.prod(self.local)

    @property
    def is_matrix(self) -> bool:
        """Whether activations are multiplied with it, where it is not looked up."""
        return len(self.shape) > 1

    @property
    def outputs(self) -> int:
        """Elements that a token has after the product, on this rank."""
        return self.local[0]

    @property
    def inputs(self) -> int:
        """Elements that a token has before the product, on this rank."""
        return math.prod(self.local[1:])


def unit_of(name: str) -> str:
    """The repeated block that a parameter is in, as `blocks.3`; the rest is one unit, ``."""
    found = _UNIT.match(name)
    return found[1] if found else ""


def by_unit(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Pieces by their unit, in the order of the model."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(unit_of(piece.name), []).append(piece)
    return found
