"""Steps for what is no box: interleaved, strided and flattened pieces travel as runs of elements.

Every message is exactly the elements that its receiver lacks, in an order on which both ends agree
(see `between`), so nothing is padded and no index is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

from vescale_dtensor._layout.mesh import Coordinate
from vescale_dtensor._layout.placements import ReduceOp
from vescale_dtensor._redistribute.ownership import Frame, Grid, between
from vescale_dtensor._redistribute.regions import Pair, Regions, compact, count
from vescale_dtensor._redistribute.stages import Stage
from vescale_dtensor._redistribute.states import Axes
from vescale_dtensor._redistribute.steps import (
    PackedAllGather,
    PackedAllToAll,
    PackedReduceScatter,
    Rearrange,
    Step,
)


def taken(pairs: Iterable[Pair]) -> Regions:
    """Where the elements of some pairs are."""
    return compact(source for source, _ in pairs)


def put(pairs: Iterable[Pair]) -> Regions:
    """Where the elements of some pairs go."""
    return compact(target for _, target in pairs)


def rearranged(old: Grid, new: Grid, frame: Frame, *, around: ReduceOp | None = None) -> Step:
    """What this rank holds and wants, where it wants it."""
    own = between(old, frame.coordinate, new, frame.coordinate)
    return Rearrange(
        shape=new.local_shape(frame.coordinate), take=taken(own), put=put(own), around=around
    )


def packed_scatter(stage: Stage, old: Grid, new: Grid, frame: Frame) -> Step:
    """Each member's part of what all members hold terms of, reduced. What nobody gets stays."""
    at = frame.coordinate
    parts = [between(old, at, new, member) for member in frame.members(stage.axes)]
    own = between(old, at, new, at)
    sizes = tuple(count(put(part)) for part in parts)
    return PackedReduceScatter(
        shape=new.local_shape(at),
        axes=stage.axes,
        wire_bytes=(sum(sizes) - count(put(own))) * frame.itemsize,
        op=stage.op,
        take=taken(pair for part in parts for pair in part),
        sizes=sizes,
        put=put(own),
    )


def packed_gather(axes: Axes, old: Grid, new: Grid, frame: Frame) -> Step:
    """All members will hold the same: each sends its part of it to all others."""
    at = frame.coordinate
    # What is wanted does not depend on `axes`, so what this rank wants is what every member does.
    parts = [between(old, member, new, at) for member in frame.members(axes)]
    own = taken(between(old, at, new, at))
    return PackedAllGather(
        shape=new.local_shape(at),
        axes=axes,
        wire_bytes=(len(parts) - 1) * count(own) * frame.itemsize,
        take=own,
        sizes=tuple(count(put(part)) for part in parts),
        put=put(pair for part in parts for pair in part),
    )


def packed_exchange(axes: Axes, old: Grid, new: Grid, frame: Frame) -> Step:
    """Exactly what each member lacks goes to it, and nothing else."""
    at, members = frame.coordinate, frame.members(axes)
    send = tuple(taken(between(old, at, new, member)) for member in members)
    receive = tuple(put(between(old, member, new, at)) for member in members)
    return PackedAllToAll(
        shape=new.local_shape(at),
        axes=axes,
        wire_bytes=_sent(send, members, at) * frame.itemsize,
        send=send,
        receive=receive,
    )


def _sent(send: tuple[Regions, ...], members: list[Coordinate], at: Coordinate) -> int:
    return sum(count(part) for part, to in zip(send, members, strict=True) if to != at)
