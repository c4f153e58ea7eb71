"""Plans who writes what: every distinct box once, divided by bytes among the ranks that hold it."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vescale_ckpt._errors import StateError, listed
from vescale_ckpt._format.write_item import WriteItem
from vescale_ckpt._tensors.dtypes import STORED_AS
from vescale_ckpt._tensors.regions import Region, first_overlap, split, whole

# A box that several ranks hold is divided into slabs of this size, so that each can write some.
SHARED_SLAB_BYTES = 64 << 20


class OfferedBox(NamedTuple):
    """One box as a rank offers it; `digest` only where copies must be compared."""

    region: Region
    digest: int | None


@dataclass(frozen=True)
class TensorOffer:
    """What one rank tells the others about its boxes of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[OfferedBox, ...]

    def to_json(self) -> list[Any]:
        """Convert to nested lists."""
        return [
            self.dtype,
            self.shape,
            [(b.region.offset, b.region.shape, b.digest) for b in self.boxes],
        ]

    @staticmethod
    def from_json(data: list[Any]) -> "TensorOffer":
        """Convert back what `to_json` made."""
        dtype, shape, offered = data
        boxes = tuple(OfferedBox(Region(tuple(o), tuple(n)), digest) for o, n, digest in offered)
        return TensorOffer(dtype, tuple(shape), boxes)


Offers = dict[str, TensorOffer]


@dataclass(frozen=True)
class SavePlan:
    """`tensors` is (dtype, global shape) by name; `items[rank]` is what that rank writes."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    items: tuple[tuple[WriteItem, ...], ...]


def plan_save(offers: list[Offers]) -> SavePlan:
    """Plan the save of what all ranks offer. A pure function: every rank computes the same plan.

    Raises:
        StateError: Offers that contradict each other, overlap, or leave elements that no rank
            holds.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    holders: dict[tuple[str, Region], dict[int, int | None]] = {}
    # In rank order everywhere below: a plan that depends on the order of a set or on a hash would
    # differ between processes.
    for rank, offer in enumerate(offers):
        for name, tensor in offer.items():
            _check_same(tensors, name, tensor, rank)
            for box in tensor.boxes:
                holders.setdefault((name, box.region), {})[rank] = box.digest
    for (name, _), copies in holders.items():
        check_copies(name, copies)
    _check_cover(tensors, holders)
    return SavePlan(tensors, _share_out(tensors, holders, len(offers)))


def _check_same(
    tensors: dict[str, tuple[str, tuple[int, ...]]], name: str, tensor: TensorOffer, rank: int
) -> None:
    dtype, shape = tensors.setdefault(name, (tensor.dtype, tensor.shape))
    if (dtype, shape) != (tensor.dtype, tensor.shape):
        raise StateError(
            f"at '{name}': rank {rank} holds a {tensor.dtype} of shape {tensor.shape}, a rank "
            f"before it a {dtype} of shape {shape}. Wrap it in RankLocal(...) if it is one per rank"
        )


def check_copies(name: str, digests: Mapping[int, int | None]) -> None:
    """Raise if ranks, given by the digests of their copies of `name`, hold different values."""
    known = {rank: digest for rank, digest in digests.items() if digest is not None}
    counts = Counter(known.values())
    # Of two that are as frequent, the lower rank's.
    usual = max(known, key=lambda rank: (counts[known[rank]], -rank), default=0)
    other = [rank for rank, digest in known.items() if digest != known[usual]]
    if other:
        raise StateError(
            f"at '{name}': a plain tensor counts as the same on every rank, but rank(s) {other} "
            f"hold other values than rank {usual}. Wrap it in RankLocal(...) to save each rank's, "
            "or pass check_replicas=False to save one of them"
        )


def _check_cover(
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    holders: dict[tuple[str, Region], dict[int, int | None]],
) -> None:
    regions: dict[str, list[Region]] = {name: [] for name in tensors}
    for name, region in holders:
        regions[name].append(region)
    for name, boxes in regions.items():
        shape = tensors[name][1]
        # Without overlaps the numbers of elements add up, so a missing element shows as a
        # difference.
        clash = first_overlap(boxes)
        if clash is not None:
            raise StateError(f"at '{name}': boxes {clash[0]} and {clash[1]} overlap")
        missing = math.prod(shape) - sum(region.numel for region in boxes)
        if missing:
            found = listed([str(region) for region in boxes]) or "nothing"
            raise StateError(
                f"at '{name}': no rank holds {missing} of the elements of {whole(shape)}; "
                f"together they hold {found}"
            )


def _share_out(
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    holders: dict[tuple[str, Region], dict[int, int | None]],
    world_size: int,
) -> tuple[tuple[WriteItem, ...], ...]:
    items: list[list[WriteItem]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    choices: list[tuple[WriteItem, list[int]]] = []
    for (name, region), copies in holders.items():
        dtype = tensors[name][0]
        limit = SHARED_SLAB_BYTES // STORED_AS[dtype].bytes_per_element
        # A box that one rank alone has is not divided: that would only make the manifest
        # longer.
        slabs = split(region, limit) if len(copies) > 1 else [region]
        choices.extend((WriteItem(name, dtype, slab), sorted(copies)) for slab in slabs)
    # Boxes that only one rank can write first, as fixed load; then the others from the largest
    # down, each to the rank with the least load. Ties go by name, region and rank, so that all
    # ranks agree.
    choices.sort(key=lambda c: (len(c[1]) > 1, -c[0].nbytes, c[0].name, c[0].region))
    for item, ranks in choices:
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += item.nbytes
        items[writer].append(item)
    return tuple(tuple(own) for own in items)
