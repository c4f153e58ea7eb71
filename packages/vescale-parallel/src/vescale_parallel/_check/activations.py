"""Estimates what forward keeps for backward on a rank, with what the plan recomputes."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vescale_parallel._checkpoint.resolve import RegionRow
from vescale_parallel._common.messages import count, human_bytes, table
from vescale_parallel._cost import Piece, Precision, Workload, activation_bytes
from vescale_parallel._notation.rows import BoundaryRow, ParameterRow


@dataclass(frozen=True)
class Activations:
    """Bytes by tokens; estimates, which are linear in them.

    Attributes:
        pieces: the parameters of a rank.
        sharers: ranks that share the batch.
        tp: ranks that share the tokens of a shard of it.
        item: bytes of an element.
        sequence_parallel: whether activations between layers are sharded, too.
        regions: what the plan recomputes.
        budget: bytes of a rank that are not to be exceeded, or None.
    """

    pieces: Sequence[Piece]
    sharers: int
    tp: int
    item: int
    sequence_parallel: bool
    regions: Sequence[RegionRow]
    budget: float | None

    def bytes_of(self, tokens: float, regions: Sequence[RegionRow]) -> float:
        """Bytes of a rank for so many tokens of the global batch, if these are recomputed."""
        work = Workload(
            tokens=0, sequence_parallel=self.sequence_parallel, regions=saved_by_region(regions)
        )
        precision = Precision(compute=self.item)
        return activation_bytes(self.pieces, tokens / self.sharers, self.tp, precision, work)

    def needed(self, tokens: float) -> int:
        """Return how many regions, the first ones, have to be recomputed to stay in the budget."""
        if self.budget is None:
            return len(self.regions)
        # Each further region keeps less, so that the least number is found by bisection.
        numbers = range(len(self.regions) + 1)
        # Of no use beyond the last: where even all of them do not suffice, it is all of them.
        sizes = [self.bytes_of(tokens, self.regions[:number]) for number in (0, len(self.regions))]
        if sizes[0] <= self.budget or sizes[1] > self.budget:
            return 0 if sizes[0] <= self.budget else len(self.regions)
        return bisect_left(
            numbers,
            True,
            key=lambda n: self.bytes_of(tokens, self.regions[:n]) <= (self.budget or 0),
        )

    def recomputed(self, tokens: float) -> Sequence[RegionRow]:
        """Return the regions that are recomputed for so many tokens of the global batch."""
        return self.regions[: self.needed(tokens)]

    def text(self) -> str:
        """Return a table of the rules, and what a token leaves behind with them and without."""
        found = Counter((row.rule, row.kind) for row in self.regions)
        rows = [(rule, kind, count(n, "module")) for (rule, kind), n in found.items()]
        shown = table(["recomputed in backward", "how", "modules"], rows)
        # A token of one rank is as many of the global batch as ranks share it.
        token = float(self.sharers)
        kept, without = self.bytes_of(token, self.regions), self.bytes_of(token, ())
        line = (
            f"activations, estimated: {human_bytes(round(kept))} a token of a rank, "
            f"{human_bytes(round(without))} without recomputation"
        )
        if self.budget is not None:
            line += (
                f"; for {human_bytes(round(self.budget))}, nothing is recomputed up to "
                f"{math.floor(self.budget / without):,} tokens of a rank, and all blocks from "
                f"{math.floor(self.budget / kept):,} on"
            )
        return f"{shown}\n{line}"


def saved_by_region(regions: Sequence[RegionRow]) -> dict[str, tuple[str, ...]]:
    """Return what the cost model asks of regions."""
    return {row.module: row.saved for row in regions}


def item_bytes(rows: Sequence[ParameterRow]) -> int:
    """Return the bytes of an element of activations: those in which most parameters compute."""
    found: Counter[int] = Counter()
    for row in rows:
        # By elements: a few norms in float32 do not make it a model in float32.
        found[row.compute.itemsize] += math.prod(row.global_shape)
    return found.most_common(1)[0][0] if found else 4


def sequence_parallel(rows: Sequence[BoundaryRow]) -> bool:
    """Return whether some module leaves its results sharded along dim 1."""
    # Dim 0 of activations is the batch, dim 1 the sequence.
    return any(r.boundary.text.rpartition("->")[2].strip().endswith(":1") for r in rows)


def sharing(pieces: Sequence[Piece], mesh: Mapping[str, int]) -> int:
    """Return how many ranks share the computation of one shard of the batch."""
    # Of layouts only: `zero` shards what is stored, and each rank computes with whole parameters.
    return math.prod(mesh[axis] for axis in {axis for one in pieces for axis, _ in one.dims})
