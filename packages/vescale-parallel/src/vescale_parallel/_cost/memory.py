"""Bytes that one rank holds at the peak of a step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from vescale_parallel._cost.pieces import Piece, by_unit
from vescale_parallel._cost.recomputation import region_of, regions_of
from vescale_parallel._cost.settings import Precision, Workload

BUCKET_BYTES: Final = 25 << 20
"""Of gradients that are summed as one at level 0, where `parallelize` is told nothing else."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that holds most.

    Attributes:
        parameters, gradients, states: between steps; gradients at the end of backward.
        gathered: parameters in the compute dtype where those that are stored do not serve: with
            ZeRO-3 those of the unit that computes, of those gathered ahead, and of the root.
        activations: what forward keeps for backward.
        reduced: gradients beside those that are kept: as backward makes them, packed to be sent,
            and what arrives.
        host: of parameters, gradients and states, on the host.
    """

    parameters: float
    gradients: float
    states: float
    gathered: float
    activations: float
    reduced: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """On the device, as if all of it were there at once: more than a step takes at any time.

        Activations are gone when the last gradients come. Not counted: buffers of modules, what
        kernels and the allocator take for themselves, and an optimizer's `foreach` at level 0.
        """
        total: float = sum(vars(self).values())
        return total - self.host


def memory_of(
    pieces: Sequence[Piece], tokens: float, dp: int, tp: int, precision: Precision, work: Workload
) -> Memory:
    """Return the bytes of a rank.

    Args:
        pieces: all parameters.
        tokens: of this rank; of several turns, all of them.
        dp: ranks that ZeRO shards over.
        tp: ranks that share the tokens of one shard of the batch.
        precision: bytes of an element.
        work: what is kept, and what is recomputed.
    """

    def held(least: int, size: int) -> float:
        """Return the bytes of all pieces; those with at least that ZeRO level are sharded."""
        # What is sharded and offloaded is on the host.
        return sum(
            one.elements * size / (dp if one.zero >= least else 1)
            for one in pieces
            if not (one.offload and one.zero >= least)
        )

    offloaded = [one for one in pieces if one.offload]
    each = precision.stored + precision.gradient + precision.state
    return Memory(
        parameters=sum(_kept(one, dp, precision) for one in pieces),
        # Those of several turns are added up before they are reduced.
        gradients=held(2 if work.turns == 1 else 4, precision.gradient),
        states=held(1, precision.state),
        host=sum(one.elements * each / dp for one in offloaded),
        gathered=gathered_bytes(pieces, precision, work),
        activations=activation_bytes(pieces, tokens / work.turns, tp, precision, work),
        reduced=reduced_bytes(pieces, dp, precision, work),
    )


def _kept(piece: Piece, dp: int, precision: Precision) -> float:
    """Return the bytes of a parameter on the device between steps."""
    shards = dp if piece.zero >= 3 else 1
    if not piece.offload:
        return piece.elements * precision.stored / shards
    # The device keeps what it computes with, or nothing.
    return piece.elements * precision.compute / shards * (piece.offload == "optimizer")


def gathered_bytes(pieces: Sequence[Piece], precision: Precision, work: Workload) -> float:
    """Return the parameters in the compute dtype beside those that are stored."""
    units = {
        unit: sum(one.elements for one in some if one.zero >= 3)
        for unit, some in by_unit(pieces).items()
    }
    # The unit that computes and those that are gathered ahead of it are at worst the largest ones;
    # the root stays gathered beside them.
    root = units.pop("", 0)
    sharded = root + sum(sorted(units.values(), reverse=True)[: 1 + work.prefetch])
    # What is stored whole, in another dtype, is cast for as long as the step takes.
    whole = sum(one.elements for one in pieces if one.zero < 3 and not one.offload)
    cast = whole if precision.compute != precision.stored else 0
    return (sharded + cast) * precision.compute


def reduced_bytes(pieces: Sequence[Piece], dp: int, precision: Precision, work: Workload) -> float:
    """Return the bytes of gradients while ranks add them up, beside those that are kept.

    A unit packs all of its gradients, and what other ranks send of theirs may be as much again.
    """
    whole = sum(one.elements for one in pieces if one.zero == 0) * precision.stored
    # At level 0 sums are new memory, beside what backward has made; packed a bucket at a time.
    found = float(whole + min(whole, BUCKET_BYTES))
    sharded = [one for one in pieces if one.zero]
    units = {name: sum(p.elements for p in some) for name, some in by_unit(sharded).items()}
    root = units.pop("", 0)
    # The root's are sent at last, when those of others may be on their way still.
    packed = sorted([root * precision.wire, *packed_bytes(pieces, precision)], reverse=True)
    found += 2 * sum(packed[: 1 + work.reduce_ahead])
    # As backward makes them: a unit's are packed when all are there, and those of the root (of a
    # head, and at last of an embedding) are there from the beginning.
    found += (root + max(units.values(), default=0)) * precision.compute
    # Where the whole is kept, the shard is beside it.
    kept = [one for one in sharded if one.zero == 1 or work.turns > 1]
    return found + sum(one.elements for one in kept) * precision.gradient / dp


def packed_bytes(pieces: Iterable[Piece], precision: Precision) -> list[float]:
    """Return the packed gradients of each unit but the root, the largest first."""
    units = by_unit(one for one in pieces if one.zero)
    sizes = (sum(p.elements for p in some) for name, some in units.items() if name)
    return sorted((size * precision.wire for size in sizes), reverse=True)


def activation_bytes(
    pieces: Sequence[Piece], tokens: float, tp: int, precision: Precision, work: Workload
) -> float:
    """Return what forward keeps: of a product input and output, of a norm two of its size.

    Products that share an input are counted as if each kept its own, which stands for what
    pointwise functions between them keep. The loss keeps logits and their logarithms in float32.
    """
    spread = tp if work.sequence_parallel else 1
    regions = regions_of(pieces, work)
    outside, inside = 0.0, dict[str, list[Piece]]()
    for one in pieces:
        region = region_of(one.name, regions)
        if region is None:
            outside += _elements(one, spread)
        else:
            inside.setdefault(region, []).append(one)
    again = 0.0
    for region, some in inside.items():
        # Each region keeps its input, as wide as its first norm or matrix takes it, and what it
        # is told to; and one of them at a time everything.
        saved = sum(_saved(one, spread, regions[region]) for one in some)
        outside += saved + (some[0].shape[-1] / spread if some[0].shape else 0.0)
        # The most of all, not the sum: backward is in one region at a time.
        again = max(again, sum(_elements(one, spread) for one in some) - saved)
    logits = sum(one.outputs for one in pieces if one.is_head)
    return tokens * ((outside + again) * precision.compute + 2 * logits * 4)


def _saved(piece: Piece, spread: int, families: Sequence[str]) -> float:
    """Return the elements that a token leaves behind of results that are kept."""
    if not piece.multiplied:
        return 0.0
    outputs = piece.outputs / (1 if 0 in {dim for _, dim in piece.dims} else spread)
    return outputs * (("matmul" in families) + (piece.attends and "attention" in families))


def _elements(piece: Piece, spread: int) -> float:
    """Return the elements that a token leaves behind at this parameter."""
    if not piece.looked_up and not piece.multiplied:
        return 2 * piece.shape[0] / spread if piece.shape else 0.0
    rows = piece.shape[-1] / spread if piece.looked_up else 0.0
    if not piece.multiplied:
        return rows
    # Dims that no axis shards are whole on every rank, unless sequences are sharded there.
    sharded = {dim for _, dim in piece.dims}
    outputs = piece.outputs / (1 if 0 in sharded else spread)
    inputs = piece.inputs / (1 if sharded - {0} else spread)
    return rows + outputs + inputs
