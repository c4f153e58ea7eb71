"""Parameters as the cost model sees them: shapes, the axes that shard them, and their unit."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vescale_parallel._cost.settings import Workload
from vescale_parallel._notation.glob import matches

# Not greedy: the outermost index counts, not that of a list inside of a block.
_UNIT = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True)
class Piece:
    """One parameter of one rank, before ZeRO shards it further.

    Attributes:
        shape: on one device.
        local: the largest shard.
        dims: the dim that each sharding axis divides.
        zero: its ZeRO level.
        looked_up: whether rows of it are looked up, as of an embedding.
        multiplied: whether activations are multiplied with it. Tied weights are both.
        attends: whether its outputs are queries.
        offload: "optimizer" or "parameters", where its shard lies on the host.
    """

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    dims: tuple[tuple[str, int], ...] = ()
    zero: int = 0
    looked_up: bool = False
    multiplied: bool = True
    attends: bool = False
    offload: str = ""

    @property
    def elements(self) -> int:
        """Elements of the shard."""
        return math.prod(self.local)

    @property
    def is_head(self) -> bool:
        """Whether its outputs are logits: a matrix outside of the repeated blocks."""
        return self.multiplied and not unit_of(self.name)

    @property
    def outputs(self) -> int:
        """Elements that a token has after the product, on this rank."""
        return self.local[0]

    @property
    def inputs(self) -> int:
        """Elements that a token has before the product, on this rank."""
        return math.prod(self.local[1:])


def piece_of(
    names: Sequence[str],
    shape: tuple[int, ...],
    local: tuple[int, ...],
    dims: tuple[tuple[str, int], ...] = (),
    *,
    zero: int = 0,
    offload: str = "",
    work: Workload,
) -> Piece:
    """Return a parameter under all its names, with its uses as the globs of `work` tell them."""
    looked_up = [name for name in names if matches(work.lookups, name)]
    matrix = len(shape) > 1
    return Piece(
        *(names[0], shape, local, dims, zero),
        looked_up=matrix and bool(looked_up),
        # A tied weight has a name for each use; one that is looked up under all of them is no
        # matrix.
        multiplied=matrix and len(looked_up) < len(names),
        attends=any(matches(work.queries, name) for name in names),
        offload=offload,
    )


def unit_of(name: str) -> str:
    """Return the repeated block that a parameter is in, as `blocks.3`; the rest is one unit, ``."""
    found = _UNIT.match(name)
    return found[1] if found else ""


def by_unit(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Pieces by their unit, in the order of the model."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(unit_of(piece.name), []).append(piece)
    return found
