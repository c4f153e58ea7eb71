"""Places the parameters of a unit in one flat buffer, and assigns its elements to ranks.

Pure arithmetic: no process, mesh or tensor is needed, so `plan.check` prints what will happen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from vescale_parallel._common.messages import table

Range = tuple[int, int]


@dataclass(frozen=True)
class SlotRequest:
    """A tensor that wants a slot.

    Attributes:
        names: the parameter's names; several where modules share it.
        shape: its local shape, the largest among the ranks that hold other parts of it.
        granule: how many elements in a row have to stay on one rank: 1, or those of a matrix or of
            a row of tiles, of which the last may be shorter.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    granule: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FlatSlot(SlotRequest):
    """A tensor's place in the buffer: it begins at element `offset`."""

    offset: int = 0

    @property
    def end(self) -> int:
        """The first element after it."""
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatPlan:
    """A flat buffer that is sharded over ranks: rank k owns the k-th of its shards.

    Attributes:
        slots: in the order of the buffer.
        sizes: elements of each rank's shard, padding included.
    """

    slots: tuple[FlatSlot, ...]
    sizes: tuple[int, ...]

    @property
    def shards(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    # Asked at each gather, so kept, here and below.
    @cached_property
    def is_even(self) -> bool:
        """Whether all shards are of one size."""
        return len(set(self.sizes)) <= 1

    @property
    def largest(self) -> int:
        """Elements of the largest shard."""
        return max(self.sizes)

    @cached_property
    def total(self) -> int:
        """Elements of the gathered buffer."""
        return sum(self.sizes)

    def start(self, rank: int) -> int:
        """Return the first element of a rank's shard."""
        return sum(self.sizes[:rank])

    @property
    def padding(self) -> int:
        """Elements that belong to no tensor."""
        return self.total - sum(slot.numel for slot in self.slots)

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """For each slot the elements that a rank owns, counted from the start of the slot."""
        low = self.start(rank)
        high = low + self.sizes[rank]
        # Clamped into the slot: where a rank owns nothing, an empty range inside it remains.
        return tuple(
            (
                min(max(low - slot.offset, 0), slot.numel),
                min(max(high - slot.offset, 0), slot.numel),
            )
            for slot in self.slots
        )

    def shares(self, position: int) -> tuple[int, ...]:
        """Return how many elements of one slot each rank owns."""
        owned = (self.ranges(rank)[position] for rank in range(self.shards))
        return tuple(high - low for low, high in owned)

    def __str__(self) -> str:
        """A table: slot, shape, offset, elements by rank."""
        rows = [
            (" = ".join(slot.names), "x".join(map(str, slot.shape)), slot.offset, self.shares(i))
            for i, slot in enumerate(self.slots)
        ]
        sizes = f"{self.largest}" if self.is_even else ", ".join(map(str, self.sizes))
        head = f"{self.shards} shards of {sizes} elements, {self.padding} of padding"
        return f"{head}\n{table(['slot', 'shape', 'offset', 'elements by rank'], rows)}"


Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a parameter's gathered values in the buffer."""


def place_of(slot: FlatSlot, shape: tuple[int, ...]) -> Place:
    """Return where values of this shape lie, from the beginning of a slot."""
    # Shorter than the slot where another axis shards the parameter unevenly.
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return shape, tuple(strides), slot.offset


def owned_places(plan: FlatPlan, rank: int, shapes: Sequence[tuple[int, ...]]) -> list[Range]:
    """For each slot where in a rank's shard its part of it begins and ends.

    Args:
        plan: of the buffer.
        rank: whose shard.
        shapes: for each slot the local shape of its gathered values on that rank.
    """
    found = []
    start = plan.start(rank)
    for slot, (low, high), shape in zip(plan.slots, plan.ranges(rank), shapes, strict=True):
        # The slot is as long as the longest of all ranks' values, where another axis shards
        # unevenly; one that is longer than this rank's values is on one rank in full.
        numel = math.prod(shape)
        low, high = min(low, numel), min(high, numel)
        # Where nothing is owned, any place does; one inside of the shard has an address.
        at = slot.offset + low - start if high > low else 0
        found.append((at, at + high - low))
    return found


def plan_flat(wanted: Sequence[SlotRequest], shards: int, alignment: int = 1) -> FlatPlan:
    """Lay tensors into the smallest buffer found that shards none of their granules.

    Args:
        wanted: the tensors, in order.
        shards: number of ranks.
        alignment: slots and shards begin at multiples of so many elements, as kernels and
            collectives like them. So blocks of so many elements are never sharded.
    """
    # A shard never has to be larger than all tensors together: then rank 0 owns everything.
    start = _aligned(-(-sum(one.numel for one in wanted) // shards), alignment)
    # Feasible sizes are not an interval (a granule fits some shards and not larger ones), so they
    # are tried in order; steps of 1/64 keep that short and the padding below 2 %.
    step = _aligned(max(start // 64, 1), alignment)
    for attempt in count():
        size = start + attempt * step
        slots = _placed(wanted, size, shards, alignment)
        if slots is not None:
            return FlatPlan(slots, (size,) * shards)
    raise AssertionError("count() does not end")


def _placed(
    wanted: Sequence[SlotRequest], size: int, shards: int, alignment: int
) -> tuple[FlatSlot, ...] | None:
    """Return the slots, one after another in shards of this size; None where they do not fit."""
    # In the order of the model: what is used together lies together.
    slots, at = [], 0
    for one in wanted:
        found = _offset(one, _aligned(at, alignment), size, alignment)
        if found is None or found + one.numel > size * shards:
            return None
        slots.append(FlatSlot(one.names, one.shape, one.granule, found))
        at = found + one.numel
    return tuple(slots)


def _offset(one: SlotRequest, at: int, size: int, alignment: int) -> int | None:
    """Return the first offset from `at` on where no shard ends inside a granule, if any."""
    if one.granule <= 1 or not one.numel:
        return at
    # Where the next shard begins.
    boundary = -(-at // size) * size if size else at
    # It ends before the next boundary, or granules end there, or it begins there.
    shift = (boundary - at) % one.granule
    aligned = (at + shift + k * one.granule for k in range(alignment))
    for offset in (at, *(o for o in aligned if o < boundary and o % alignment == 0), boundary):
        if _granules_kept(one, offset, size):
            return offset
    return None


def _granules_kept(one: SlotRequest, offset: int, size: int) -> bool:
    # The first boundary behind its start: one at its start cuts nothing.
    first = (offset // size + 1) * size
    ends = range(first, offset + one.numel, size)
    # Two ends decide: all others are as far apart as these.
    return all((end - offset) % one.granule == 0 for end in ends[:2])


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def pieces_of(owned: Sequence[tuple[int, int]], size: int) -> tuple[list[int], list[int]]:
    """Return the sizes of the pieces that a shard is split into, and the piece of each slot.

    A piece is what a rank owns of a slot, or the padding between two of them or behind the last.

    Args:
        owned: for each slot, where its part in the shard begins and ends.
        size: of the shard, in elements.
    """
    sizes: list[int] = []
    places: list[int] = []
    done = 0
    for at, end in owned:
        if end > at > done:
            sizes.append(at - done)
        places.append(len(sizes))
        sizes.append(end - at)
        done = max(done, end)
    return [*sizes, size - done], places
