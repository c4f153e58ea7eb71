"""Writes one rank's data files, and returns what the manifest has to say about them."""

from collections.abc import Callable, Collection, Iterable, Sequence
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
from vescale_ckpt._format.write_item import WriteItem
from vescale_ckpt._progress import ByteCounter, Progress
from vescale_ckpt._save.plan import OfferedBox, Offers, TensorOffer
from vescale_ckpt._state.flatten import FlatState
from vescale_ckpt._storage.base import Storage, Writer
from vescale_ckpt._tensors.boxes import Box, TensorBoxes, box_view, narrow_to, region_of
from vescale_ckpt._tensors.dtypes import STORED_AS, dtype_name
from vescale_ckpt._tensors.local_boxes import local_and_boxes
from vescale_ckpt._tensors.regions import Shape, intersect, split
from vescale_ckpt._tensors.streams import streams_of, use_streams

# Copies of plain tensors up to this size are compared between ranks: RNG states, steps, buffers.
COMPARED_BYTES = 1 << 20
# How many bytes make another thread, with a file of its own, worth it. Writes into one file wait
# for each other.
_FILE_BYTES = 32 << 20
_WINDOW_BYTES = 4 * BLOCK_BYTES


class LocalTensors:
    """The tensors of one rank: what it can offer, and the data of any region that it holds.

    Holds references to the tensors of the state and copies nothing.
    """

    def __init__(self, flat: FlatState) -> None:
        self._tensors: dict[str, tuple[torch.Tensor, TensorBoxes]] = {}
        self._private, self._replicated = flat.private, flat.replicated
        for name, tensor in flat.tensors.items():
            try:
                self._tensors[name] = local_and_boxes(tensor)
            except Exception as error:
                # Any exception, also of the tensor's own class, as for a partial DTensor: with the
                # name of the leaf.
                raise StateError(f"at '{name}': {as_checkpoint_error(error)}") from error
            # Saved as one rank's own value, its other shards would be lost.
            declared = self._tensors[name][1].declared
            if declared and name in self._replicated:
                raise StateError(f"at '{name}': a sharded tensor inside a Replicated: take it out")
            if name in self._private and declared:
                raise StateError(f"at '{name}': a sharded tensor inside a RankLocal: take it out")

    def offers(self, *, compare: bool) -> Offers:
        """Offer what this rank holds; with digests of small plain tensors, to compare copies."""
        return {name: self._offer(name, compare) for name in self._tensors}

    def digests(self) -> dict[str, list[int]]:
        """Return digests of the tensors whose copies are compared; of an empty one, none."""
        return {
            name: [_digest(local, box) for box in layout.boxes]
            for name, (local, layout) in self._tensors.items()
            if self._is_compared(name)
        }

    def devices(self) -> set[torch.device]:
        """Return where the tensors are."""
        return {local.device for local, _ in self._tensors.values()}

    def _is_compared(self, name: str) -> bool:
        local, layout = self._tensors[name]
        # Only tensors that count as copies because nothing says otherwise: comparing costs a copy
        # from the device and a checksum each.
        small = local.numel() * local.element_size() <= COMPARED_BYTES
        wanted = self._replicated.get(name, small and not layout.declared)
        return wanted and name not in self._private

    def _offer(self, name: str, compare: bool) -> TensorOffer:
        local, layout = self._tensors[name]
        digested = compare and self._is_compared(name)
        held = tuple(
            OfferedBox(region_of(box), _digest(local, box) if digested else None)
            for box in layout.boxes
        )
        try:
            return TensorOffer(dtype_name(local.dtype), layout.global_shape, held)
        except StateError as error:
            raise StateError(f"at '{name}': {error}") from None

    def data(self, item: WriteItem) -> memoryview:
        """Return the bytes of a region in one of this rank's boxes."""
        return bytes_of(self.view(item))

    def view(self, item: WriteItem) -> torch.Tensor:
        """Return the elements of a region in one of this rank's boxes."""
        local, layout = self._tensors[item.name]
        # Plans name regions of boxes that this rank has offered, so one of its boxes contains the
        # region.
        box = next(b for b in layout.boxes if intersect(region_of(b), item.region) == item.region)
        return narrow_to(box_view(local, box), region_of(box), item.region)


class WriteJob(NamedTuple):
    """One rank's part of a save: where to write, what, and how."""

    storage: Storage
    directory: str
    rank: int
    # Global shape of every tensor, by name.
    shapes: dict[str, Shape]
    checksum: Checksum
    tell: Progress
    # Returns the bytes of an item; and is called when they are written.
    data: Callable[[WriteItem], memoryview]
    done: Callable[[WriteItem], None]
    # Where the data comes from.
    devices: Collection[torch.device] = ()


def write_data(job: WriteJob, files: list[list[WriteItem]]) -> list[dict[str, Any]]:
    """Write this rank's files. Returns a record for the manifest of each."""
    total = sum(item.nbytes for items in files for item in items)
    count = ByteCounter(total, job.tell)
    if len(files) <= 1:
        return [_write_items(job, 0, items, count) for items in files if items]
    # A thread per file. Leaving the block waits for all of them, also after one has failed: no
    # thread may write into a directory that is being removed.
    ours = streams_of(job.devices)
    pool = ThreadPoolExecutor(len(files), "vescale-ckpt-write", use_streams, (ours,))
    with pool:
        started = [pool.submit(_write_items, job, i, part, count) for i, part in enumerate(files)]
    # All have ended; the error of the first file that failed is the error of the save.
    return [one.result() for one in started]


def divide_into_files(items: Sequence[WriteItem], threads: int) -> list[list[WriteItem]]:
    """Divide a rank's items into files, balanced by bytes, each in the order of the file."""
    total = sum(item.nbytes for item in items)
    count = max(1, min(threads, total // _FILE_BYTES))
    # No file should get more than its share: a single large tensor is divided, too.
    parts = [part for item in items for part in split_item(item, -(-total // count))]
    files: list[list[WriteItem]] = [[] for _ in range(count)]
    load = [0] * count
    for part in sorted(parts, key=lambda p: (-p.nbytes, p.name, p.region)):
        smallest = load.index(min(load))
        files[smallest].append(part)
        load[smallest] += part.nbytes
    return [in_file_order(part) for part in files if part]


def as_one_file(items: Iterable[WriteItem]) -> list[WriteItem]:
    """Return the items of a rank that writes one file, in the order of the file."""
    return in_file_order(list(items))


def split_item(item: WriteItem, at_most: int) -> list[WriteItem]:
    """Split an item into parts of at most `at_most` bytes, or of one element."""
    itemsize = STORED_AS[item.dtype].bytes_per_element
    return [item._replace(region=r) for r in split(item.region, max(1, at_most // itemsize))]


def _write_items(
    job: WriteJob, number: int, items: list[WriteItem], count: ByteCounter
) -> dict[str, Any]:
    # The header comes first in a safetensors file, so all offsets are computed from sizes, before
    # any data is looked at.
    entries, begin = {}, 0
    for item in items:
        name = entry_name(item.name, item.region, job.shapes[item.name])
        entries[name] = header_entry(item, begin)
        begin += item.nbytes
    header = encode_header(entries)
    # By rank and number: no two ranks or threads ever create the same file.
    file_name = f"r{job.rank:05d}{f'-{number}' if number else ''}.safetensors"
    return {
        "file": file_name,
        "bytes": len(header) + begin,
        "header_bytes": len(header),
        "header_checksum": job.checksum.of_block(header),
        "chunks": _write_file(job, f"{job.directory}/{file_name}", header, items, count),
    }


def _write_file(
    job: WriteJob, path: str, header: bytes, items: list[WriteItem], count: ByteCounter
) -> list[list[Any]]:
    """Write a file; returns [name, offset, shape, start, bytes, checksums] of every item."""
    position, chunks = len(header), []
    largest = max((item.nbytes for item in items), default=0)
    window = memoryview(bytearray(min(_WINDOW_BYTES, largest)))
    writer = job.storage.create(path)
    try:
        writer.write(memoryview(header))
        for item in items:
            # One item at a time: where a copy is needed (from a device, or of strided memory), the
            # peak is one item and not all of the state.
            checksums = _write_item(writer, job.data(item), job.checksum, window)
            # From here on nothing reads the item's bytes, so a staging buffer may be reused.
            job.done(item)
            region = item.region
            chunks.append(
                [item.name, region.offset, region.shape, position, item.nbytes, checksums]
            )
            position += item.nbytes
            count.add(item.nbytes)
        # Synced here, by the rank that wrote it: another machine could not sync it later.
        writer.finish()
    finally:
        # After `finish` this does nothing; after an error it closes the file.
        writer.abandon()
    return chunks


def _write_item(writer: Writer, data: memoryview, checksum: Checksum, window: memoryview) -> str:
    """Write through a window that is still in the processor's cache when it is copied."""
    digits = []
    for start in range(0, data.nbytes, window.nbytes):
        part = data[start : start + window.nbytes]
        # Another thread may be changing the tensor meanwhile. The checksum and the file have to see
        # the same bytes, or a save that was reported as done could not be loaded.
        own = window[: part.nbytes]
        own[:] = part
        digits.append(checksum.of_blocks(own))
        writer.write(own)
    return "".join(digits)


def _digest(local: torch.Tensor, box: Box) -> int:
    return int(CRC32.of_block(bytes_of(box_view(local, box))), 16)
