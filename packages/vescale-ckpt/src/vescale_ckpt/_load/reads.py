"""What a load has to read: which blocks of which chunks, and where their elements belong."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from vescale_ckpt._format.manifest import Chunk, Manifest
from vescale_ckpt._tensors.boxes import Layout, box_view, narrowed, region_of
from vescale_ckpt._tensors.dtypes import STORED_AS, torch_dtype
from vescale_ckpt._tensors.regions import (
    Region,
    blocks_touched,
    first_byte,
    intersect,
    merged,
    split,
)

Target = tuple[str, torch.Tensor, Layout]
# What is read, verified and put in place at a time: bounds the memory that a load needs.
SLAB_BYTES = 4 << 20


class SlabId(NamedTuple):
    """A slab of a chunk of a tensor, by numbers that are the same on every rank."""

    tensor: int
    chunk: int
    slab: int


class Wish(NamedTuple):
    """A part of a slab, and the memory that it belongs in."""

    part: Region
    destination: torch.Tensor


class SlabRead(NamedTuple):
    """All that is wanted of one slab: a region whose bytes lie side by side in a chunk."""

    id: SlabId
    name: str
    dtype: str
    chunk: Chunk
    region: Region
    # Its first byte within the chunk, and the blocks of the chunk that are wanted.
    begin: int
    nbytes: int
    blocks: list[range]
    wishes: list[Wish]

    @property
    def place(self) -> tuple[str, int]:
        """Where it lies on the disk."""
        return self.chunk.file, self.chunk.start + self.begin


def plan_reads(manifest: Manifest, targets: Iterable[Target]) -> list[SlabRead]:
    """The slabs that hold what the targets want, in the order of the disk."""
    wishes: dict[tuple[str, int], list[Wish]] = {}
    for name, local, layout in targets:
        for box in layout.boxes:
            region = region_of(box)
            for i, chunk in enumerate(manifest.tensors[name].chunks):
                part = intersect(region, chunk.region)
                if part is not None:
                    place = narrowed(box_view(local, box), region, part)
                    wishes.setdefault((name, i), []).append(Wish(part, place))
    numbers = {name: i for i, name in enumerate(manifest.tensors)}
    reads = [
        slab
        for (name, i), wanted in wishes.items()
        for slab in _slabs(manifest, numbers[name], name, i, wanted)
    ]
    return sorted(reads, key=lambda read: read.place)


def slab_regions(region: Region, itemsize: int) -> list[Region]:
    """The slabs that a chunk is read in."""
    return split(region, max(1, SLAB_BYTES // itemsize))


def _slabs(
    manifest: Manifest, number: int, name: str, index: int, wishes: list[Wish]
) -> Iterator[SlabRead]:
    tensor = manifest.tensors[name]
    chunk, itemsize = tensor.chunks[index], STORED_AS[tensor.dtype].bytes_per_element
    for i, region in enumerate(slab_regions(chunk.region, itemsize)):
        inside = [wish for wish in wishes if intersect(wish.part, region)]
        if not inside:
            continue
        parts = [_within(wish, region) for wish in inside]
        spans: list[range] = []
        for part, _ in parts:
            spans.extend(blocks_touched(chunk.region, part, itemsize, manifest.block_bytes))
        yield SlabRead(
            id=SlabId(number, index, i),
            name=name,
            dtype=tensor.dtype,
            chunk=chunk,
            region=region,
            begin=first_byte(chunk.region, region, itemsize),
            nbytes=region.numel * itemsize,
            blocks=merged(spans),
            wishes=parts,
        )


def _within(wish: Wish, region: Region) -> Wish:
    part = intersect(wish.part, region)
    assert part is not None
    return Wish(part, narrowed(wish.destination, wish.part, part))


def scatter(read: SlabRead, stored: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Put the elements of a slab, given as all of its bytes, where they are wanted."""
    whole = torch.from_numpy(stored).view(torch_dtype(read.dtype)).view(read.region.shape)
    # torch's copy does what is left: any strides, another dtype, the way to another device.
    with torch.no_grad():
        for wish in read.wishes:
            wish.destination.copy_(narrowed(whole, read.region, wish.part))


def destination_bytes(read: SlabRead) -> memoryview | None:
    """The memory that takes exactly the bytes of a slab, if there is such."""
    if len(read.wishes) != 1 or read.wishes[0].part != read.region:
        return None
    target = read.wishes[0].destination
    plain = target.device.type == "cpu" and target.is_contiguous() and not target.is_neg()
    if not plain or target.is_conj() or target.dtype != torch_dtype(read.dtype):
        return None
    return target.reshape(-1).view(torch.uint8).numpy().data


def mark_written(read: SlabRead) -> None:
    """Tell autograd that what `destination_bytes` gave was written to, as `copy_` does.

    A backward pass that needs the values of before then raises, and does not take the new ones.
    """
    for wish in read.wishes:
        if not wish.destination.is_inference():
            torch.autograd.graph.increment_version(wish.destination)


def blocks_nbytes(chunk: Chunk, blocks: Iterable[range], block_bytes: int) -> int:
    """How many bytes blocks of a chunk are; its last block may be short."""
    return sum(
        min(span.stop * block_bytes, chunk.nbytes) - span.start * block_bytes for span in blocks
    )
