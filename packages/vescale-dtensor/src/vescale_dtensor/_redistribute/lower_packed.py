"""Lower stages for shards that are not boxes: interleaved, strided and flattened ones.

Their elements are packed into one dim. Every message holds exactly the elements that its receiver
lacks, in an order on which both ends agree (see `shared_elements`), so nothing is padded and no
index is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

from vescale_dtensor._layout.mesh import Coordinate
from vescale_dtensor._layout.placements import ReduceOp
from vescale_dtensor._redistribute.ownership import OwnershipMap, PlanContext, shared_elements
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


def source_regions(pairs: Iterable[Pair]) -> Regions:
    """Return where the elements of some pairs are before the step."""
    return compact(source for source, _ in pairs)


def target_regions(pairs: Iterable[Pair]) -> Regions:
    """Return where the elements of some pairs are after the step."""
    return compact(target for _, target in pairs)


def copy_own(
    old: OwnershipMap, new: OwnershipMap, frame: PlanContext, *, identity_of: ReduceOp | None = None
) -> Step:
    """Copy what this rank both holds and will own to where it belongs; local.

    `identity_of` names the reduction whose identity element fills the rest, if there is any.
    """
    # Asked with the same coordinate twice: only local elements, whatever the groups are.
    own = shared_elements(old, frame.coordinate, new, frame.coordinate)
    return Rearrange(
        shape=new.local_shape(frame.coordinate),
        source=source_regions(own),
        target=target_regions(own),
        identity_of=identity_of,
    )


def packed_scatter(stage: Stage, old: OwnershipMap, new: OwnershipMap, frame: PlanContext) -> Step:
    """Reduce-scatter elements packed by member; what no member will own is left out."""
    at = frame.coordinate
    # Every member holds partial values of the same elements, so this rank computes from its own
    # what each of them packs and gets.
    parts = [shared_elements(old, at, new, member) for member in frame.members(stage.axes)]
    own = shared_elements(old, at, new, at)
    sizes = tuple(count(target_regions(part)) for part in parts)
    return PackedReduceScatter(
        shape=new.local_shape(at),
        axes=stage.axes,
        wire_bytes=(sum(sizes) - count(target_regions(own))) * frame.itemsize,
        op=stage.op,
        source=source_regions(pair for part in parts for pair in part),
        sizes=sizes,
        target=target_regions(own),
    )


def packed_gather(axes: Axes, old: OwnershipMap, new: OwnershipMap, frame: PlanContext) -> Step:
    """Give every member the same elements: each sends its part of them to all others."""
    at = frame.coordinate
    # What is wanted does not depend on `axes`, so what this rank wants is what every member wants.
    parts = [shared_elements(old, member, new, at) for member in frame.members(axes)]
    own = source_regions(shared_elements(old, at, new, at))
    return PackedAllGather(
        shape=new.local_shape(at),
        axes=axes,
        wire_bytes=(len(parts) - 1) * count(own) * frame.itemsize,
        source=own,
        sizes=tuple(count(target_regions(part)) for part in parts),
        target=target_regions(pair for part in parts for pair in part),
    )


def packed_exchange(axes: Axes, old: OwnershipMap, new: OwnershipMap, frame: PlanContext) -> Step:
    """Send each member exactly what it lacks."""
    at, members = frame.coordinate, frame.members(axes)
    # Both sides are listed by member, empty ones included: position i is member i of the group.
    send = tuple(source_regions(shared_elements(old, at, new, member)) for member in members)
    receive = tuple(target_regions(shared_elements(old, member, new, at)) for member in members)
    return PackedAllToAll(
        shape=new.local_shape(at),
        axes=axes,
        wire_bytes=_sent(send, members, at) * frame.itemsize,
        send=send,
        receive=receive,
    )


def _sent(send: tuple[Regions, ...], members: list[Coordinate], at: Coordinate) -> int:
    """Count the elements that leave this rank."""
    return sum(count(part) for part, to in zip(send, members, strict=True) if to != at)
