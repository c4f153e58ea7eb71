"""Collectives of a step, by mesh axis."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vescale_parallel._cost.pieces import Piece, by_unit
from vescale_parallel._cost.recomputation import region_of, regions_of
from vescale_parallel._cost.settings import Precision, Workload

HOST_LINK: Final = "host"
"""Stands for an axis: the link between a device and the memory of its host."""


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind, size and group.

    Attributes:
        axis: the mesh axis whose ranks take part.
        kind: all_reduce, all_gather, reduce_scatter, or send, of a message to one other rank;
            to_device and to_host, over `HOST_LINK` in place of an axis, are copies.
        size: bytes of the whole tensor that is reduced, gathered or sent, on one rank of other
            axes.
        count: how many of them.
        hides: whether it can run while other units compute.
    """

    axis: str
    kind: str
    size: float
    count: int = 1
    hides: bool = False

    def sent(self, members: int) -> float:
        """Return the bytes that one of `members` ranks sends in all of them."""
        if self.kind in ("send", "to_device", "to_host"):
            return self.count * self.size
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * self.count * self.size * (members - 1) / members


def activation_transfers(
    pieces: Sequence[Piece], tokens: float, precision: Precision, work: Workload
) -> Iterator[Transfer]:
    """Sums over tensor-parallel axes, one forward and one backward for each region.

    A region ends in a weight whose inputs are sharded: its output is a sum over ranks, and so is
    the gradient of what entered the region. With sequence parallelism each of these is a
    reduce-scatter and an all-gather, which together take what an all-reduce takes.
    """
    regions = regions_of(pieces, work)
    for piece in pieces:
        for axis, dim in piece.dims:
            # Of the global shape: what is summed over ranks is whole on each of them.
            outputs, inputs = (tokens * piece.shape[i] * precision.compute for i in (0, -1))
            if dim == 0 and piece.looked_up:
                yield Transfer(axis, "all_reduce", inputs)  # rows that other ranks hold
            if dim == 0 and piece.is_head:
                yield Transfer(axis, "all_reduce", inputs)  # the gradient of what it reads
            if dim > 0 and piece.multiplied:
                # Recomputed regions sum their outputs again.
                again = region_of(piece.name, regions) is not None
                yield Transfer(axis, "all_reduce", outputs, 3 if again else 2)


def replica_transfers(
    pieces: Sequence[Piece], axis: str, dp: int, precision: Precision
) -> Iterator[Transfer]:
    """Sums of gradients over an axis that replicates what ZeRO shards over `dp` ranks."""
    parts = (one.elements / (dp if one.zero else 1) for one in pieces)
    yield Transfer(axis, "all_reduce", sum(parts) * precision.wire, hides=True)


def parameter_transfers(
    pieces: Sequence[Piece], axis: str, precision: Precision, turns: int
) -> Iterator[Transfer]:
    """Gathers and reductions over the axis that data is parallel over.

    Of several `turns`, microbatches one after another, each gathers; gradients are reduced once.
    """
    whole = sum(one.elements for one in pieces if one.zero == 0)
    if whole:
        yield Transfer(axis, "all_reduce", whole * precision.wire, hides=True)
    split = sum(one.elements for one in pieces if one.zero in (1, 2))
    if split:
        yield Transfer(axis, "reduce_scatter", split * precision.wire, hides=True)
        # Of what the update has just written: nothing computes until it has arrived.
        yield Transfer(axis, "all_gather", split * precision.compute)
    units = by_unit(one for one in pieces if one.zero >= 3)
    last = next((unit for unit in reversed(list(units)) if unit), None)
    for unit, some in units.items():
        elements = sum(one.elements for one in some)
        # The root unit, and that with which backward begins, stay gathered after forward.
        gathers = turns * (1 if unit in ("", last) else 2)
        yield Transfer(axis, "all_gather", elements * precision.compute, gathers, hides=True)
        yield Transfer(axis, "reduce_scatter", elements * precision.wire, hides=True)


def host_transfers(
    pieces: Sequence[Piece], dp: int, precision: Precision, turns: int
) -> Iterator[Transfer]:
    """Copies of what lies on the host: shards to the device, and their gradients back."""
    kept = [one for one in pieces if one.offload == "optimizer"]
    # Once after each step; else before each gather.
    for unit, some in by_unit(kept).items():
        size = sum(one.elements for one in some) * precision.stored / dp
        yield Transfer(HOST_LINK, "to_device", size, hides=bool(unit) and some[0].zero >= 3)
    for unit, some in by_unit(one for one in pieces if one.offload == "parameters").items():
        size = sum(one.elements for one in some) * precision.stored / dp
        yield Transfer(HOST_LINK, "to_device", size, turns * (2 if unit else 1), hides=True)
    moved = sum(one.elements for one in pieces if one.offload)
    if moved:
        yield Transfer(HOST_LINK, "to_host", moved * precision.gradient / dp, hides=True)
