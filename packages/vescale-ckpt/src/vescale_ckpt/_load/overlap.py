"""Finds targets that are the same memory: both saved tensors would be loaded into it.

The last one would win, in an arbitrary order. Tied weights, which a state_dict holds under
two names, are fine as long as what was saved under both is the same.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from vescale_ckpt._format.manifest import Manifest
from vescale_ckpt._load.fetch import fetch, uncounted
from vescale_ckpt._load.open import Checkpoint
from vescale_ckpt._load.reads import Target, plan_reads
from vescale_ckpt._storage.base import Storage
from vescale_ckpt._tensors.boxes import Box, TensorBoxes, byte_view, region_of
from vescale_ckpt._tensors.dtypes import torch_dtype
from vescale_ckpt._tensors.regions import Region, split

# Elements in memory at a time of two saved tensors that are compared by reading both.
_COMPARED_ELEMENTS = 4 << 20


class Twins(NamedTuple):
    """Two names of one tensor of `into`, which checksums do not tell to be the same as saved."""

    first: str
    second: str
    layout: TensorBoxes

    def __str__(self) -> str:
        return (
            f"'{self.first}' and '{self.second}': in `into` they are one tensor, and the "
            f"checkpoint holds two that differ: {_ADVICE}"
        )


class _Span(NamedTuple):
    """The memory that a box is in, from the first byte of its elements to the last."""

    begin: int
    end: int
    target: int
    box: Box
    itemsize: int


def without_twins(
    manifest: Manifest, targets: list[Target]
) -> tuple[list[Target], list[str], list[Twins]]:
    """Leave out targets that are the memory of another; refuse those that are so in part.

    Returns the targets that are left, a sentence for each pair that cannot be loaded, and the pairs
    that can only if `saved_alike` finds the same elements.
    """
    twins: set[int] = set()
    refused, unproven = [], []
    # Sorted, so that of several names the first one in the state is kept, on every rank.
    for first, second in sorted(_pairs(targets)):
        one, other = targets[first][0], targets[second][0]
        if first == second:
            refused.append(f"'{one}': two boxes of `into` are the same memory: clone() it first")
        elif not _are_one_tensor(targets[first], targets[second]):
            refused.append(f"'{one}' and '{other}': in `into` they overlap in memory: {_ADVICE}")
        else:
            # Read once, under the first name.
            twins.add(second)
            if not _same_checksums(manifest, one, other):
                unproven.append(Twins(one, other, targets[first][2]))
    return [target for i, target in enumerate(targets) if i not in twins], refused, unproven


def saved_alike(storage: Storage, checkpoint: Checkpoint, twins: Twins) -> bool:
    """Return whether a checkpoint holds the same for twins, where this rank needs it: by reading.

    Writers may have divided the two otherwise, so that their checksums are of other blocks.
    """
    one, other = (checkpoint.manifest.tensors[name] for name in twins[:2])
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    regions = (part for b in twins.layout.boxes for part in split(region_of(b), _COMPARED_ELEMENTS))
    return all(
        _bits_of(storage, checkpoint, twins.first, region).equal(
            _bits_of(storage, checkpoint, twins.second, region)
        )
        for region in regions
    )


def _bits_of(storage: Storage, checkpoint: Checkpoint, name: str, region: Region) -> torch.Tensor:
    record = checkpoint.manifest.tensors[name]
    part = torch.empty(region.shape, dtype=torch_dtype(record.dtype), device="cpu")
    layout = TensorBoxes(record.shape, (Box(*region, 0, tuple(part.stride())),))
    fetch(storage, checkpoint, plan_reads(checkpoint.manifest, [(name, part, layout)]), uncounted())
    # As bytes: equal nan are equal here, and 0.0 and -0.0 are not.
    return byte_view(part)


_ADVICE = "clone() one of them, or load only one of them (`only`)"


def overlaps_itself(box: Box) -> bool:
    """Return whether elements of a box share memory: an expanded tensor, or sliding windows."""
    if 0 in box.shape:
        return False
    reach = 0
    for stride, n in sorted(zip(box.local_strides, box.shape, strict=True)):
        if n > 1 and stride == 0:
            return True
        if n > 1 and stride <= reach:
            # This dim's stride falls inside the dims before it. Their elements may still interleave
            # without meeting, so they are counted.
            return _marked([box], box.local_offset) < math.prod(box.shape)
        reach += (n - 1) * stride
    return False


def _pairs(targets: list[Target]) -> set[tuple[int, int]]:
    """Find pairs of targets, by number, that share an element."""
    by_device: dict[torch.device, list[_Span]] = defaultdict(list)
    for i, (_, local, layout) in enumerate(targets):
        by_device[local.device].extend(_spans(i, local, layout.boxes))
    return {pair for spans in by_device.values() for pair in _overlapping(spans)}


def _spans(target: int, local: torch.Tensor, boxes: Iterable[Box]) -> Iterator[_Span]:
    # By address and not by storage: several tensors may be made of one array of NumPy.
    itemsize = local.element_size()
    for box in boxes:
        if 0 in box.shape:
            continue
        begin = local.data_ptr() + box.local_offset * itemsize
        yield _Span(begin, begin + _reach(box) * itemsize, target, box, itemsize)


def _reach(box: Box) -> int:
    """Return how many elements there are from the first of a box to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(box.shape, box.local_strides, strict=True))


def _overlapping(spans: list[_Span]) -> Iterator[tuple[int, int]]:
    active: list[_Span] = []
    for span in sorted(spans, key=lambda s: s[:3]):
        # A sweep over memory: of many tensors only those that reach this one's begin are compared.
        active = [other for other in active if other.end > span.begin]
        for other in active:
            if _share_an_element(other, span):
                yield min(other.target, span.target), max(other.target, span.target)
        active.append(span)


def _share_an_element(a: _Span, b: _Span) -> bool:
    """Return whether two boxes whose memory overlaps have an element in common.

    Rows of one may be between rows of the other. Boxes of elements of different sizes, or at odd
    distances, are assumed to share one.
    """
    apart = b.begin - a.begin
    # The usual cases, and the only ones of large tensors: the same first element, or no gaps. What
    # follows allocates a mark for every place.
    if apart == 0 or all(_reach(s.box) == math.prod(s.box.shape) for s in (a, b)):
        return True
    if a.itemsize != b.itemsize or apart % a.itemsize:
        return True
    shifted = Box(b.box.global_offset, b.box.shape, apart // a.itemsize, b.box.local_strides)
    origin = Box(a.box.global_offset, a.box.shape, 0, a.box.local_strides)
    return _marked([origin, shifted], 0) < math.prod(a.box.shape) + math.prod(b.box.shape)


def _marked(boxes: list[Box], base: int) -> int:
    """Count the places in memory of the elements of boxes, from element `base` on."""
    room = max(box.local_offset - base + _reach(box) for box in boxes)
    marks = torch.zeros(room, dtype=torch.bool, device="cpu")
    for box in boxes:
        marks.as_strided(box.shape, box.local_strides, box.local_offset - base).fill_(True)
    return int(marks.sum())


def _are_one_tensor(a: Target, b: Target) -> bool:
    """Return whether two targets are the same elements in the same places."""
    same_memory = a[1].data_ptr() == b[1].data_ptr() and a[1].dtype == b[1].dtype
    return same_memory and (a[2].global_shape, a[2].boxes) == (b[2].global_shape, b[2].boxes)


def _same_checksums(manifest: Manifest, a: str, b: str) -> bool:
    """Return whether two saved tensors are the same by their checksums, block by block."""
    one, other = manifest.tensors[a], manifest.tensors[b]
    blocks = [[(c.region, c.nbytes, c.checksums) for c in t.chunks] for t in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and blocks[0] == blocks[1]
