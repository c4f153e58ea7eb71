"""Reads the blocks that the targets need, verifies each, and copies the elements to the targets."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from vescale_ckpt._errors import CorruptError
from vescale_ckpt._format.checksums import Checksum
from vescale_ckpt._format.manifest import Chunk, FileRecord
from vescale_ckpt._load.open import Checkpoint
from vescale_ckpt._load.reads import (
    SLAB_BYTES,
    SlabRead,
    blocks_nbytes,
    destination_bytes,
    mark_written,
    scatter,
)
from vescale_ckpt._progress import ByteCounter, silent
from vescale_ckpt._storage.base import Reader, Storage
from vescale_ckpt._tensors.streams import streams_of, use_streams

# Bytes read and verified at a time: they are still in the processor's cache when verified.
WINDOW_BYTES = 1 << 20
# Less than this per thread is not worth one.
_THREAD_BYTES = 8 << 20


def uncounted() -> ByteCounter:
    """Return a counter for reads that are not reported."""
    return ByteCounter(0, silent)


def fetch(
    storage: Storage,
    checkpoint: Checkpoint,
    reads: list[SlabRead],
    count: ByteCounter,
    threads: int = 1,
) -> None:
    """Fill the targets of `reads`, which are in the order of the disk."""
    block_bytes = checkpoint.manifest.block_bytes
    sizes = [blocks_nbytes(read.chunk, read.blocks, block_bytes) for read in reads]

    def work(part: list[SlabRead]) -> None:
        # One buffer and one set of open files per thread: nothing is shared but the counter.
        buffer = np.empty(_buffer_bytes(part, block_bytes), dtype=np.uint8)
        with OpenFiles(storage, checkpoint) as files:
            for read in part:
                _read_slab(files.chunk(read.name, read.chunk), read, buffer)
                count.add(blocks_nbytes(read.chunk, read.blocks, block_bytes))

    parts = _shares(reads, sizes, max(1, min(threads, sum(sizes) // _THREAD_BYTES)))
    if len(parts) == 1:
        work(parts[0])
        return
    # Threads help, since reading and checksums release the interpreter's lock.
    ours = streams_of(target.destination.device for read in reads for target in read.targets)
    pool = ThreadPoolExecutor(len(parts), "vescale-ckpt-read", use_streams, (ours,))
    with pool:
        # The list waits for all of them; the first that failed raises here.
        list(pool.map(work, parts))


class OpenFiles:
    """The data files of a checkpoint, one open at a time, the header of each verified."""

    def __init__(self, storage: Storage, checkpoint: Checkpoint) -> None:
        self._storage, self._checkpoint = storage, checkpoint
        self._name = ""
        self._reader: Reader | None = None

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *failure: object) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def chunk(self, name: str, chunk: Chunk) -> "ChunkFile":
        """Open a chunk of the tensor `name`, ready to be read."""
        manifest, path = self._checkpoint.manifest, self._checkpoint.file(chunk.file)
        # Reads are in the order of the disk, so keeping one file open is enough.
        if self._reader is None or chunk.file != self._name:
            self.__exit__()
            self._name, self._reader = chunk.file, self._storage.open(path)
            # No reader uses the header, but it is part of what was saved: every byte is verified.
            check_header(self._reader, path, manifest.files[chunk.file], manifest.checksum)
        return ChunkFile(self._reader, path, name, chunk, manifest.block_bytes, manifest.checksum)


def check_header(reader: Reader, path: str, record: FileRecord, checksum: Checksum) -> bytes:
    """Read and verify the header of a data file."""
    header = bytearray(record.header_bytes)
    reader.read_into(0, memoryview(header))
    if checksum.of_block(header) != record.header_checksum:
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
    checksum: Checksum

    def span(self, blocks: range) -> slice:
        """Return which bytes of the chunk consecutive blocks hold."""
        return slice(
            blocks.start * self.block_bytes,
            min(blocks.stop * self.block_bytes, self.chunk.nbytes),
        )

    def read(self, blocks: range, buffer: memoryview) -> None:
        """Read consecutive blocks and verify each; raises naming the first bad one."""
        begin = self.span(blocks).start
        for window in self.windows(blocks):
            span = self.span(window)
            self._read_window(window, buffer[span.start - begin : span.stop - begin])

    def windows(self, blocks: range) -> Iterator[range]:
        """Divide consecutive blocks into a few at a time."""
        step = max(1, WINDOW_BYTES // self.block_bytes)
        for first in range(blocks.start, blocks.stop, step):
            yield range(first, min(first + step, blocks.stop))

    def _read_window(self, blocks: range, buffer: memoryview) -> None:
        chunk, begin = self.chunk, self.span(blocks).start
        self.reader.read_into(chunk.start + begin, buffer)
        # Before any of it is used: what does not match its checksum never gets into a tensor.
        for block in blocks:
            low = block * self.block_bytes - begin
            data = buffer[low : low + self.block_bytes]
            if self.checksum.of_block(data) != self.checksum.nth(chunk.checksums, block):
                at = chunk.start + begin + low
                raise CorruptError(
                    f"{self.path}: bytes {at} to {at + data.nbytes} do not match their checksum; "
                    f"they hold '{self.name}' {chunk.region}"
                )


def _shares(reads: list[SlabRead], sizes: list[int], parts: int) -> list[list[SlabRead]]:
    """Divide a list into consecutive parts of about the same number of bytes."""
    shares: list[list[SlabRead]] = [[] for _ in range(parts)]
    total, done = sum(sizes), 0
    for read, size in zip(reads, sizes, strict=True):
        shares[min(parts - 1, done * parts // max(1, total))].append(read)
        done += size
    return shares


def _buffer_bytes(reads: list[SlabRead], block_bytes: int) -> int:
    # A slab may begin and end inside a block, so up to two more blocks are read.
    largest = max((min(read.nbytes, read.chunk.nbytes) for read in reads), default=0)
    return max(largest, min(WINDOW_BYTES, SLAB_BYTES)) + 2 * block_bytes


def _read_slab(
    file: ChunkFile, read: SlabRead, buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> None:
    target = destination_bytes(read)
    if target is not None:
        _copy_through(file, read, buffer.data, target)
        mark_written(read)
        return
    # All blocks of a slab side by side, as in the chunk; bytes that are not wanted stay undefined.
    base = (read.begin // file.block_bytes) * file.block_bytes
    for blocks in read.blocks:
        span = file.span(blocks)
        file.read(blocks, buffer.data[span.start - base : span.stop - base])
    scatter(read, buffer[read.begin - base : read.begin - base + read.nbytes])


def _copy_through(file: ChunkFile, read: SlabRead, buffer: memoryview, target: memoryview) -> None:
    """Copy window by window into the tensor, each after it was verified."""
    for blocks in read.blocks:
        for window in file.windows(blocks):
            span = file.span(window)
            part = buffer[: span.stop - span.start]
            file.read(window, part)
            # Only the slab's part of the window: the first and the last block may reach beyond it.
            low = max(span.start, read.begin)
            high = min(span.stop, read.begin + read.nbytes)
            target[low - read.begin : high - read.begin] = part[
                low - span.start : high - span.start
            ]
