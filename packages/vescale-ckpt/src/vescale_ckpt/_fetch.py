"""Read exactly the blocks that the targets need, verify each, and put the elements in place."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vescale_ckpt import _checksum
from vescale_ckpt._boxes import Region, blocks_touched, intersect, merged
from vescale_ckpt._dtypes import STORED_AS, torch_dtype
from vescale_ckpt._errors import CorruptError
from vescale_ckpt._layout import Layout, box_view, narrowed, region_of
from vescale_ckpt._manifest import Chunk, FileRecord, TensorRecord
from vescale_ckpt._open import Checkpoint
from vescale_ckpt._progress import Progress
from vescale_ckpt._storage import Reader, Storage

Target = tuple[str, torch.Tensor, Layout]


class _Wish(NamedTuple):
    """A part of a chunk, and the memory that it belongs in."""

    part: Region
    destination: torch.Tensor


class _ChunkRead(NamedTuple):
    """All that is wanted of one chunk; its blocks are read once."""

    name: str
    dtype: str
    chunk: Chunk
    wishes: list[_Wish]
    blocks: list[range]


def fetch(
    storage: Storage, checkpoint: Checkpoint, targets: Iterable[Target], tell: Progress
) -> int:
    """Fill every target; returns the number of data bytes that were read."""
    block_bytes = checkpoint.manifest.block_bytes
    reads = _plan(checkpoint, targets)
    total = sum(_nbytes(read, block_bytes) for read in reads)
    done = 0
    # In the order of the disk, and with one file open at a time.
    by_file: dict[str, list[_ChunkRead]] = {}
    for read in sorted(reads, key=lambda r: (r.chunk.file, r.chunk.start)):
        by_file.setdefault(read.chunk.file, []).append(read)
    for name, of_file in by_file.items():
        path = checkpoint.file(name)
        reader = storage.open(path)
        try:
            check_header(reader, path, checkpoint.manifest.files[name])
            for read in of_file:
                file = ChunkFile(reader, path, read.name, read.chunk, block_bytes)
                _read_chunk(file, read)
                done += _nbytes(read, block_bytes)
                tell(done, total)
        finally:
            reader.close()
    return total


def check_header(reader: Reader, path: str, record: FileRecord) -> bytes:
    """Read and verify the header of a data file."""
    header = bytearray(record.header_bytes)
    reader.read_into(0, memoryview(header))
    if _checksum.of_block(header) != record.header_checksum:
        raise CorruptError(f"{path}: header (bytes 0 to {len(header)}) does not match its checksum")
    return bytes(header)


@dataclass(frozen=True)
class ChunkFile:
    """One chunk in an open data file."""

    reader: Reader
    path: str
    name: str
    chunk: Chunk
    block_bytes: int

    def span(self, blocks: range) -> slice:
        """Which bytes of the chunk consecutive blocks hold."""
        return slice(
            blocks.start * self.block_bytes,
            min(blocks.stop * self.block_bytes, self.chunk.nbytes),
        )

    def read(self, blocks: range, buffer: memoryview) -> None:
        """Read consecutive blocks and verify each; raises naming the first bad one."""
        chunk, begin = self.chunk, self.span(blocks).start
        self.reader.read_into(chunk.start + begin, buffer)
        for block in blocks:
            low = block * self.block_bytes - begin
            data = buffer[low : low + self.block_bytes]
            if _checksum.of_block(data) != _checksum.nth(chunk.checksums, block):
                at = chunk.start + begin + low
                raise CorruptError(
                    f"{self.path}: bytes {at} to {at + data.nbytes} do not match their checksum; "
                    f"they hold '{self.name}' {chunk.region}"
                )


def _plan(checkpoint: Checkpoint, targets: Iterable[Target]) -> list[_ChunkRead]:
    # By chunk, not by box: many small boxes of one chunk share the blocks that they lie in.
    wishes: dict[tuple[str, int], list[_Wish]] = {}
    tensors = checkpoint.manifest.tensors
    for name, local, layout in targets:
        for box in layout.boxes:
            region = region_of(box)
            for i, chunk in enumerate(tensors[name].chunks):
                part = intersect(region, chunk.region)
                if part is not None:
                    place = narrowed(box_view(local, box), region, part)
                    wishes.setdefault((name, i), []).append(_Wish(part, place))
    return [
        _chunk_read(name, tensors[name], tensors[name].chunks[i], wanted, checkpoint)
        for (name, i), wanted in wishes.items()
    ]


def _chunk_read(
    name: str, tensor: TensorRecord, chunk: Chunk, wishes: list[_Wish], checkpoint: Checkpoint
) -> _ChunkRead:
    itemsize = STORED_AS[tensor.dtype].bytes_per_element
    block_bytes = checkpoint.manifest.block_bytes
    spans: list[range] = []
    for wish in wishes:
        spans.extend(blocks_touched(chunk.region, wish.part, itemsize, block_bytes))
    return _ChunkRead(name, tensor.dtype, chunk, wishes, merged(spans))


def _nbytes(read: _ChunkRead, block_bytes: int) -> int:
    return sum(
        min(blocks.stop * block_bytes, read.chunk.nbytes) - blocks.start * block_bytes
        for blocks in read.blocks
    )


def _read_chunk(file: ChunkFile, read: _ChunkRead) -> None:
    # As large as the chunk, but pages between the blocks that are read are never touched.
    buffer = np.empty(read.chunk.nbytes, dtype=np.uint8)
    for blocks in read.blocks:
        file.read(blocks, buffer.data[file.span(blocks)])
    region = read.chunk.region
    stored = torch.from_numpy(buffer).view(torch_dtype(read.dtype)).view(region.shape)
    # torch's copy does what is left: any strides, and the way to another device.
    with torch.no_grad():
        for wish in read.wishes:
            wish.destination.copy_(narrowed(stored, region, wish.part))
