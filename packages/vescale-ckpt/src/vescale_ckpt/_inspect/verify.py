"""`verify`: read every byte of a checkpoint and say what is wrong with it, all of it."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from vescale_ckpt._errors import CheckpointError, CorruptError, FormatError, listed
from vescale_ckpt._format.manifest import Chunk, Manifest
from vescale_ckpt._format.safetensors import entry_name, header_entry
from vescale_ckpt._format.write_item import WriteItem
from vescale_ckpt._load.fetch import ChunkFile, check_header
from vescale_ckpt._load.open import Checkpoint, open_checkpoint
from vescale_ckpt._progress import ByteCounter, Progress, silent
from vescale_ckpt._storage.base import Reader, Storage
from vescale_ckpt._storage.resolve import resolve, storage_of
from vescale_ckpt._untrusted import Entry, parse_header

# One read while verifying: many blocks, little memory.
_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class Verified:
    """What `verify` has read and found to be right."""

    path: str
    generation: str
    tensors: int
    files: int
    nbytes: int
    provenance: dict[str, Any]


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Verified:
    """Check every byte of the checkpoint at `path`. For this process only: not collective.

    Reads all data files against the checksums of the manifest, the manifest against the digest
    of the commit record, and the safetensors headers against the manifest.

    Args:
        path: A checkpoint.
        progress: Called with (bytes read, bytes to read).

    Raises:
        CorruptError: Naming each file, tensor and byte range that is damaged.
        CheckpointError: There is no committed checkpoint at `path`, or its manifest is not legal.

    Examples:
        >>> import tempfile, torch, vescale_ckpt
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> vescale_ckpt.save(path, {"weight": torch.ones(1000)})
        >>> vescale_ckpt.verify(path).tensors
        1
    """
    return verify_with(storage_of(path), resolve(path), progress or silent)


def verify_with(storage: Storage, path: str, progress: Progress) -> Verified:
    """Run `verify` on any storage."""
    checkpoint = open_checkpoint(storage, path)
    manifest = checkpoint.manifest
    total = sum(record.nbytes for record in manifest.files.values())
    count, problems = ByteCounter(total, progress), []
    chunks = _chunks_by_file(manifest)
    # All files, also after a damaged one: the report is to be complete.
    for file in manifest.files:
        problems += _problems_in(storage, checkpoint, file, chunks[file], count)
    if problems:
        raise CorruptError(f"{len(problems)} problem(s) in {path}: {listed(problems)}")
    return Verified(
        path=path,
        generation=checkpoint.generation,
        tensors=len(manifest.tensors),
        files=len(manifest.files),
        nbytes=total,
        provenance=manifest.provenance,
    )


def _problems_in(
    storage: Storage,
    checkpoint: Checkpoint,
    file: str,
    chunks: list[tuple[str, Chunk]],
    count: ByteCounter,
) -> list[str]:
    manifest, path = checkpoint.manifest, checkpoint.file(file)
    try:
        reader = storage.open(path)
    except CheckpointError as error:
        return [str(error)]
    try:
        # Header first: safetensors tools read the data by it, though this package does not.
        problems = _header_problems(reader, path, manifest, file, chunks)
        count.add(manifest.files[file].header_bytes)
        for name, chunk in chunks:
            whole = ChunkFile(reader, path, name, chunk, manifest.block_bytes, manifest.checksum)
            problems += _chunk_problems(whole, count)
    finally:
        reader.close()
    return problems


def _chunks_by_file(manifest: Manifest) -> dict[str, list[tuple[str, Chunk]]]:
    """Return the chunks of every file, in the order in which they are in it."""
    found: dict[str, list[tuple[str, Chunk]]] = {file: [] for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            found[chunk.file].append((name, chunk))
    return {file: sorted(chunks, key=lambda c: c[1].start) for file, chunks in found.items()}


def _header_problems(
    reader: Reader, path: str, manifest: Manifest, file: str, chunks: list[tuple[str, Chunk]]
) -> list[str]:
    """Compare the header with the manifest: other tools must read the same from it."""
    record = manifest.files[file]
    try:
        header = check_header(reader, path, record, manifest.checksum)
        length = int.from_bytes(header[:8], "little")
        if length != len(header) - 8:
            raise FormatError(f"{path}: its header has {length} bytes, {len(header) - 8} are due")
        entries = parse_header(header[8:])
    except CheckpointError as error:
        return [str(error)]
    except ValueError as error:
        return [f"{path}: {error}"]
    expected = {}
    for name, chunk in chunks:
        tensor = manifest.tensors[name]
        item = WriteItem(name, tensor.dtype, chunk.region)
        entry = header_entry(item, chunk.start - record.header_bytes)
        shape, span = entry["shape"], entry["data_offsets"]
        label = entry_name(name, chunk.region, tensor.shape)
        expected[label] = Entry(entry["dtype"], tuple(shape), *span)
    return [] if entries == expected else [f"{path}: its header is at odds with the manifest"]


def _chunk_problems(file: ChunkFile, count: ByteCounter) -> list[str]:
    chunk, block_bytes = file.chunk, file.block_bytes
    step = max(1, _READ_BYTES // block_bytes)
    blocks = -(-chunk.nbytes // block_bytes)
    buffer = np.empty(min(step * block_bytes, chunk.nbytes), dtype=np.uint8)
    problems = []
    for first in range(0, blocks, step):
        part = range(first, min(first + step, blocks))
        span = file.span(part)
        try:
            file.read(part, buffer.data[: span.stop - span.start])
        except CheckpointError as error:
            problems.append(str(error))
        count.add(span.stop - span.start)
    return problems
