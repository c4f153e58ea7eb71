"""A step put together: memory, traffic and computation of one rank, and seconds of all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vescale_parallel._common.messages import human_bytes, table
from vescale_parallel._cost.compute import (
    hardware_flops,
    host_update_bytes,
    model_flops,
    update_bytes,
)
from vescale_parallel._cost.links import Cluster, collective_seconds
from vescale_parallel._cost.memory import Memory, activation_bytes, memory_of
from vescale_parallel._cost.pieces import Piece
from vescale_parallel._cost.settings import Precision, Workload
from vescale_parallel._cost.traffic import (
    HOST_LINK,
    Transfer,
    activation_transfers,
    host_transfers,
    parameter_transfers,
    replica_transfers,
)


@dataclass(frozen=True, kw_only=True)
class StepPlace:
    """Where a step runs.

    Attributes:
        mesh: size by axis, in mesh order; the last axis is the innermost.
        batch: axes over which the batch is sharded.
        over: the axis that ZeRO shards over, and gradients are summed over.
        cluster: devices and links.
    """

    mesh: Mapping[str, int]
    batch: tuple[str, ...]
    over: str
    cluster: Cluster

    @property
    def ranks(self) -> int:
        """All of the mesh."""
        return math.prod(self.mesh.values())

    def seconds(self, transfer: Transfer) -> float:
        """Of all collectives of this transfer."""
        if transfer.axis == HOST_LINK:
            host = self.cluster.host
            return transfer.count * (host.latency + transfer.size / host.bandwidth)
        axes = list(self.mesh)
        # Neighbours along an axis are as far apart as the axes inside of it are large together;
        # beyond a node, their link is slower.
        stride = math.prod(self.mesh[axis] for axis in axes[axes.index(transfer.axis) + 1 :])
        members = self.mesh[transfer.axis]
        link = self.cluster.link(stride, members)
        each = collective_seconds(transfer.kind, transfer.size, members, link)
        return transfer.count * each


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one step costs; `str(cost)` is a table.

    Attributes:
        ranks, tokens: of the mesh and of the global batch.
        memory: bytes of one rank.
        flops: that the model needs of one rank, recomputation not counted.
        compute, update: seconds of matrix products and of what is recomputed, and of the optimizer.
        transfers: collectives of one rank, with the bytes that it sends and their seconds.
        exposed: seconds in which a rank waits, for collectives or for other stages.
        cluster: where.
        bubble: the part of all ranks' time in which stages wait for each other, from 0 to 1.
    """

    ranks: int
    tokens: int
    memory: Memory
    flops: float
    compute: float
    update: float
    transfers: tuple[tuple[Transfer, float, float], ...]
    exposed: float
    cluster: Cluster
    bubble: float = 0.0

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.compute + self.update + self.exposed

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        return self.tokens / self.seconds / self.ranks

    @property
    def utilization(self) -> float:
        """The part of the peak flops that goes into the model."""
        return self.flops / self.seconds / self.cluster.flops

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.memory.total <= self.cluster.memory

    def seconds_over(self, axis: str) -> float:
        """Of all collectives over one axis, hidden ones too."""
        return sum(seconds for one, _, seconds in self.transfers if one.axis == axis)

    def __str__(self) -> str:
        """Two tables, and the sum."""
        parts = vars(self.memory).items()
        memory = table(
            ["memory of a rank", "bytes"],
            [(name, human_bytes(round(size))) for name, size in parts],
            right=["bytes"],
        )
        rows = [
            (one.axis, one.kind, one.count, human_bytes(round(sent)), f"{1e3 * seconds:.3g}")
            for one, sent, seconds in _merged(self.transfers)
        ]
        header = ["axis", "collective", "count", "sent by a rank", "ms"]
        wire = table(header, rows, right=header[2:])
        return f"{memory}\n\n{wire}\n\n{self._summary()}"

    def _summary(self) -> str:
        where = f"{self.cluster.name} x {self.ranks}"
        fits = "fits" if self.fits else "does NOT fit"
        stages = f", bubble {self.bubble:.1%}" if self.bubble else ""
        return (
            f"{where}: {1e3 * self.seconds:.4g} ms a step ({1e3 * self.compute:.4g} compute, "
            f"{1e3 * self.update:.3g} update, {1e3 * self.exposed:.4g} waiting{stages}), "
            f"{self.tokens_per_second:.4g} tokens/s a device, {self.utilization:.1%} of peak; "
            f"{human_bytes(round(self.memory.total))} a rank, {fits}"
        )


def _merged(
    transfers: Sequence[tuple[Transfer, float, float]],
) -> list[tuple[Transfer, float, float]]:
    """One line for each axis and kind."""
    found: dict[tuple[str, str], tuple[Transfer, float, float]] = {}
    for one, sent, seconds in transfers:
        key = one.axis, one.kind
        known, other, earlier = found.get(key, (Transfer(*key, 0.0, 0), 0.0, 0.0))
        merged = Transfer(*key, known.size + one.size * one.count, known.count + one.count)
        found[key] = merged, other + sent, earlier + seconds
    return list(found.values())


def estimate(
    pieces: Sequence[Piece], scene: StepPlace, work: Workload, precision: Precision | None = None
) -> Cost:
    """Return the cost of a step.

    Tokens are shared evenly by the ranks that the batch is sharded over; all ranks of other axes
    compute with the same tokens. Gathers and reductions over data-parallel axes hide behind
    `cluster.overlap` of the computation, save the first gather, which nothing precedes.
    """
    precision = precision or Precision()
    shards = math.prod(scene.mesh.get(axis, 1) for axis in scene.batch)
    tokens = work.tokens / shards
    dp = scene.mesh.get(scene.over, 1)
    tp = math.prod(scene.mesh[axis] for axis in {axis for one in pieces for axis, _ in one.dims})
    memory = memory_of(pieces, tokens, dp, tp, precision, work)
    found = [
        # Each microbatch sends what is its own: as many times, of as much less. Parameters are sent
        # whole each time, which `parameter_transfers` counts by itself.
        replace(one, count=one.count * work.turns)
        for one in activation_transfers(pieces, tokens / work.turns, precision, work)
    ]
    found += parameter_transfers(pieces, scene.over, precision, work.turns)
    # Hybrid sharding: shards that other axes of the batch replicate are summed over those.
    for axis in scene.batch:
        if axis != scene.over:
            found += replica_transfers(pieces, axis, dp, precision)
    found += host_transfers(pieces, dp, precision, work.turns)
    transfers = tuple(
        (one, one.sent(scene.mesh.get(one.axis, 1)), scene.seconds(one))
        for one in found
        # An axis that the mesh lacks, or has with one rank, sends nothing.
        if one.axis == HOST_LINK or scene.mesh.get(one.axis, 1) > 1
    )
    cluster = scene.cluster
    flops = hardware_flops(pieces, tokens, work)
    # What is not kept is written and read once more.
    everything = replace(work, recompute=False, regions={})
    dropped = activation_bytes(pieces, tokens, tp, precision, everything)
    # `memory` has the activations of one microbatch at a time. Nothing is dropped of one region,
    # whose inputs are kept beside all that is in it.
    dropped = max(dropped - memory.activations * work.turns, 0.0)
    compute = flops / (cluster.flops * cluster.efficiency) + 2 * dropped / cluster.memory_bandwidth
    level = max((one.zero for one in pieces), default=0)
    return Cost(
        ranks=scene.ranks,
        tokens=work.tokens,
        memory=memory,
        flops=model_flops(pieces, tokens, work),
        compute=compute,
        update=update_bytes(memory, dp, level) / cluster.memory_bandwidth
        + host_update_bytes(pieces, dp, precision) / cluster.host_bandwidth,
        transfers=transfers,
        exposed=waited(transfers, compute * cluster.overlap),
        cluster=cluster,
    )


def waited(transfers: Sequence[tuple[Transfer, float, float]], cover: float) -> float:
    """Return the seconds waited: what cannot hide, and of the rest what outlasts its cover."""
    waiting = sum(seconds for one, _, seconds in transfers if not one.hides)
    hidden = sum(s for one, _, s in transfers if one.hides and one.axis != HOST_LINK)
    # Over a link of their own, beside collectives.
    copied = sum(s for one, _, s in transfers if one.hides and one.axis == HOST_LINK)
    # However long the computation is, it cannot begin before the first gather has ended.
    kinds = ("all_gather", "to_device")
    firsts = (next((s / o.count for o, _, s in transfers if o.kind == k), 0.0) for k in kinds)
    # Two streams beside computation, of which the longer counts; and never less than the first
    # gather.
    return waiting + max(min(sum(firsts), hidden + copied), max(hidden, copied) - cover)
