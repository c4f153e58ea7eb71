"""One rank's part of a save: its data files, and what the manifest must say about it."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from vescale_ckpt._errors import StateError, as_checkpoint_error
from vescale_ckpt._format.checksums import BLOCK_BYTES, CRC32, Checksum
from vescale_ckpt._format.safetensors import (
    bytes_of,
    encode_header,
    entry_name,
    header_entry,
    in_file_order,
)
from vescale_ckpt._format.write_item import Piece
from vescale_ckpt._progress import Count, Progress
from vescale_ckpt._save.plan import Held, Offers, TensorOffer
from vescale_ckpt._state.flatten import Flat
from vescale_ckpt._storage.base import Storage, Writer
from vescale_ckpt._tensors.boxes import Box, Layout, box_view, narrowed, region_of
from vescale_ckpt._tensors.dtypes import STORED_AS, dtype_name
from vescale_ckpt._tensors.local_boxes import local_and_layout
from vescale_ckpt._tensors.regions import Shape, intersect, split

# Copies of plain tensors up to this size are compared: it covers RNG states, steps, buffers.
COMPARED_BYTES = 1 << 20
# A thread of its own is worth this many bytes, and so is a file of its own: writes into one file
# wait for each other.
_FILE_BYTES = 32 << 20
_WINDOW_BYTES = 4 * BLOCK_BYTES


class Sources:
    """The tensors of one rank: what it can offer, and the data of any region that it holds."""

    def __init__(self, flat: Flat) -> None:
        self._held: dict[str, tuple[torch.Tensor, Layout]] = {}
        self._private, self._replicated = flat.private, flat.replicated
        for name, tensor in flat.tensors.items():
            try:
                self._held[name] = local_and_layout(tensor)
            except Exception as error:
                # Also what the tensor's own class raises, such as for a pending sum.
                raise StateError(f"at '{name}': {as_checkpoint_error(error)}") from error
            # Saved for one rank only, its other parts would be lost.
            declared = self._held[name][1].declared
            if declared and name in self._replicated:
                raise StateError(f"at '{name}': a sharded tensor inside a Replicated: take it out")
            if name in self._private and declared:
                raise StateError(f"at '{name}': a sharded tensor inside a RankLocal: take it out")

    def offers(self, *, compare: bool) -> Offers:
        """What this rank holds; with digests of small plain tensors if copies are compared."""
        return {name: self._offer(name, compare) for name in self._held}

    def digests(self) -> dict[str, list[int]]:
        """Of every tensor whose copies are to be compared; of one without elements, none."""
        return {
            name: [_digest(local, box) for box in layout.boxes]
            for name, (local, layout) in self._held.items()
            if self._is_compared(name)
        }

    def _is_compared(self, name: str) -> bool:
        local, layout = self._held[name]
        # Only where copies are presumed: comparing costs a copy from the device and a checksum.
        small = local.numel() * local.element_size() <= COMPARED_BYTES
        wanted = self._replicated.get(name, small and not layout.declared)
        return wanted and name not in self._private

    def _offer(self, name: str, compare: bool) -> TensorOffer:
        local, layout = self._held[name]
        digested = compare and self._is_compared(name)
        held = tuple(
            Held(region_of(box), _digest(local, box) if digested else None) for box in layout.boxes
        )
        try:
            return TensorOffer(dtype_name(local.dtype), layout.global_shape, held)
        except StateError as error:
            raise StateError(f"at '{name}': {error}") from None

    def data(self, piece: Piece) -> memoryview:
        """The bytes of a region that lies in one of this rank's boxes."""
        return bytes_of(self.view(piece))

    def view(self, piece: Piece) -> torch.Tensor:
        """The elements of a region that lies in one of this rank's boxes."""
        local, layout = self._held[piece.name]
        box = next(b for b in layout.boxes if intersect(region_of(b), piece.region) == piece.region)
        return narrowed(box_view(local, box), region_of(box), piece.region)


class Job(NamedTuple):
    """One rank's part of a save: where to write, what, and how."""

    storage: Storage
    directory: str
    rank: int
    # Of every tensor by name.
    shapes: dict[str, Shape]
    checksum: Checksum
    tell: Progress
    # The bytes of a piece, and what to call when they are written.
    data: Callable[[Piece], memoryview]
    done: Callable[[Piece], None]


def write_data(job: Job, files: list[list[Piece]]) -> list[dict[str, Any]]:
    """Write this rank's files. Returns a record for the manifest of each."""
    total = sum(piece.nbytes for pieces in files for piece in pieces)
    count = Count(total, job.tell)
    if len(files) <= 1:
        return [_write_pieces(job, 0, pieces, count) for pieces in files if pieces]
    with ThreadPoolExecutor(len(files), "vescale-ckpt-write") as pool:
        started = [pool.submit(_write_pieces, job, i, part, count) for i, part in enumerate(files)]
    # All have ended here; what the first to fail raised is what the save raises.
    return [one.result() for one in started]


def files_of(pieces: Sequence[Piece], threads: int) -> list[list[Piece]]:
    """The pieces of each file of a rank, as they follow each other in it; balanced by bytes."""
    total = sum(piece.nbytes for piece in pieces)
    count = max(1, min(threads, total // _FILE_BYTES))
    parts = [part for piece in pieces for part in cut(piece, -(-total // count))]
    files: list[list[Piece]] = [[] for _ in range(count)]
    load = [0] * count
    for part in sorted(parts, key=lambda p: (-p.nbytes, p.name, p.region)):
        smallest = load.index(min(load))
        files[smallest].append(part)
        load[smallest] += part.nbytes
    return [in_file_order(part) for part in files if part]


def in_one_file(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces of a rank that writes one file, as they follow each other in it."""
    return in_file_order(list(pieces))


def cut(piece: Piece, at_most: int) -> list[Piece]:
    """A piece in parts of at most `at_most` bytes, or of one element."""
    itemsize = STORED_AS[piece.dtype].bytes_per_element
    return [piece._replace(region=r) for r in split(piece.region, max(1, at_most // itemsize))]


def _write_pieces(job: Job, number: int, pieces: list[Piece], count: Count) -> dict[str, Any]:
    # The header comes first in the file: all sizes are known before any data is looked at.
    entries, begin = {}, 0
    for piece in pieces:
        name = entry_name(piece.name, piece.region, job.shapes[piece.name])
        entries[name] = header_entry(piece, begin)
        begin += piece.nbytes
    header = encode_header(entries)
    file_name = f"r{job.rank:05d}{f'-{number}' if number else ''}.safetensors"
    return {
        "file": file_name,
        "bytes": len(header) + begin,
        "header_bytes": len(header),
        "header_checksum": job.checksum.of_block(header),
        "chunks": _write_file(job, f"{job.directory}/{file_name}", header, pieces, count),
    }


def _write_file(
    job: Job, path: str, header: bytes, pieces: list[Piece], count: Count
) -> list[list[Any]]:
    """Returns [tensor name, offset, shape, start, bytes, checksums] of every piece."""
    position, chunks = len(header), []
    largest = max((piece.nbytes for piece in pieces), default=0)
    window = memoryview(bytearray(min(_WINDOW_BYTES, largest)))
    writer = job.storage.create(path)
    try:
        writer.write(memoryview(header))
        for piece in pieces:
            # One piece at a time: where a copy is needed (from a device, or of strided memory),
            # the peak is one piece, not the whole state.
            checksums = _write_piece(writer, job.data(piece), job.checksum, window)
            job.done(piece)
            region = piece.region
            chunks.append(
                [piece.name, region.offset, region.shape, position, piece.nbytes, checksums]
            )
            position += piece.nbytes
            count.add(piece.nbytes)
        writer.finish()
    finally:
        writer.abandon()
    return chunks


def _write_piece(writer: Writer, data: memoryview, checksum: Checksum, window: memoryview) -> str:
    """A window at a time: it is still in the processor's cache when it is copied to the file."""
    digits = []
    for start in range(0, data.nbytes, window.nbytes):
        part = data[start : start + window.nbytes]
        # Another thread may be changing the tensor: what is written must be what was summed up,
        # or a save that was reported as done could not be loaded.
        own = window[: part.nbytes]
        own[:] = part
        digits.append(checksum.of_blocks(own))
        writer.write(own)
    return "".join(digits)


def _digest(local: torch.Tensor, box: Box) -> int:
    return int(CRC32.of_block(bytes_of(box_view(local, box))), 16)
