"""Plans what a load reads: which blocks of which chunks, and where their elements belong."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from vescale_ckpt._format.manifest import Chunk, Manifest
from vescale_ckpt._tensors.boxes import TensorBoxes, box_view, byte_view, narrow_to, region_of
from vescale_ckpt._tensors.dtypes import STORED_AS, torch_dtype
from vescale_ckpt._tensors.regions import (
    Region,
    blocks_touched,
    first_byte,
    intersect,
    merge_ranges,
    split,
)

Target = tuple[str, torch.Tensor, TensorBoxes]
# Bytes that are read, verified and scattered at a time: bounds the memory that a load needs.
SLAB_BYTES = 4 << 20


class SlabId(NamedTuple):
    """A slab of a chunk of a tensor, by numbers that are the same on every rank."""

    tensor: int
    chunk: int
    slab: int


class SlabTarget(NamedTuple):
    """A part of a slab, and the memory that it belongs in."""

    part: Region
    destination: torch.Tensor


class SlabRead(NamedTuple):
    """All that is wanted of one slab: a region whose bytes are contiguous in a chunk."""

    id: SlabId
    name: str
    dtype: str
    chunk: Chunk
    region: Region
    # Where it begins within the chunk, in bytes; its size; and the blocks of the chunk to read.
    begin: int
    nbytes: int
    blocks: list[range]
    targets: list[SlabTarget]

    @property
    def disk_position(self) -> tuple[str, int]:
        """File and byte at which it begins, to sort by."""
        return self.chunk.file, self.chunk.start + self.begin


def plan_reads(manifest: Manifest, targets: Iterable[Target]) -> list[SlabRead]:
    """Find the slabs that hold what the targets want, in the order of the disk."""
    wanted: dict[tuple[str, int], list[SlabTarget]] = {}
    for name, local, layout in targets:
        for box in layout.boxes:
            region = region_of(box)
            for i, chunk in enumerate(manifest.tensors[name].chunks):
                part = intersect(region, chunk.region)
                if part is not None:
                    destination = narrow_to(box_view(local, box), region, part)
                    wanted.setdefault((name, i), []).append(SlabTarget(part, destination))
    # Numbers instead of names: they are equal on all ranks, as the manifest is, and short to send.
    reads = [
        slab
        for (name, i), parts in wanted.items()
        for slab in _slabs(manifest, manifest.numbers[name], name, i, parts)
    ]
    # In the order of the disk, so that files are read front to back and opened once.
    return sorted(reads, key=lambda read: read.disk_position)


def slab_regions(region: Region, itemsize: int) -> list[Region]:
    """Divide a chunk into the slabs that it is read in."""
    return split(region, max(1, SLAB_BYTES // itemsize))


def _slabs(
    manifest: Manifest, number: int, name: str, index: int, targets: list[SlabTarget]
) -> Iterator[SlabRead]:
    tensor = manifest.tensors[name]
    chunk, itemsize = tensor.chunks[index], STORED_AS[tensor.dtype].bytes_per_element
    for i, region in enumerate(slab_regions(chunk.region, itemsize)):
        inside = [target for target in targets if intersect(target.part, region)]
        if not inside:
            continue
        parts = [_target_within(target, region) for target in inside]
        spans: list[range] = []
        for part, _ in parts:
            # Checksums are per block, so complete blocks are read, also where one element of it is
            # wanted.
            spans.extend(blocks_touched(chunk.region, part, itemsize, manifest.block_bytes))
        yield SlabRead(
            id=SlabId(number, index, i),
            name=name,
            dtype=tensor.dtype,
            chunk=chunk,
            region=region,
            begin=first_byte(chunk.region, region, itemsize),
            nbytes=region.numel * itemsize,
            blocks=merge_ranges(spans),
            targets=parts,
        )


def _target_within(target: SlabTarget, region: Region) -> SlabTarget:
    part = intersect(target.part, region)
    assert part is not None
    return SlabTarget(part, narrow_to(target.destination, target.part, part))


def scatter(read: SlabRead, stored: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Copy the elements of a slab, given as all of its bytes, to where they are wanted."""
    whole = torch.from_numpy(stored).view(torch_dtype(read.dtype)).view(read.region.shape)
    # torch's copy does the rest: any strides, another dtype, another device.
    # Parameters that require grad are filled in place, which autograd refuses otherwise.
    with torch.no_grad():
        for target in read.targets:
            target.destination.copy_(narrow_to(whole, read.region, target.part))


def destination_bytes(read: SlabRead) -> memoryview | None:
    """Return the memory that takes exactly the bytes of a slab, or None."""
    if len(read.targets) != 1 or read.targets[0].part != read.region:
        return None
    target = read.targets[0].destination
    plain = target.device.type == "cpu" and target.is_contiguous() and not target.is_neg()
    if not plain or target.is_conj() or target.dtype != torch_dtype(read.dtype):
        return None
    return byte_view(target).numpy().data


def mark_written(read: SlabRead) -> None:
    """Tell autograd that the memory of `destination_bytes` was written to, as `copy_` does.

    A backward pass that needs the former values then raises, and does not use the new ones.
    """
    for target in read.targets:
        # Tensors made in inference mode have no version.
        if not target.destination.is_inference():
            torch.autograd.graph.increment_version(target.destination)


def blocks_nbytes(chunk: Chunk, blocks: Iterable[range], block_bytes: int) -> int:
    """Return how many bytes blocks of a chunk are; its last block may be short."""
    return sum(
        min(span.stop * block_bytes, chunk.nbytes) - span.start * block_bytes for span in blocks
    )
