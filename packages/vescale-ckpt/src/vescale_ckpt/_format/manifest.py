"""The manifest and the commit record of a checkpoint, as values, and their JSON form."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vescale_ckpt._format import checksums, strict_json
from vescale_ckpt._state.values import Node
from vescale_ckpt._tensors.regions import Region

FORMAT = "vescale-ckpt"
VERSION = 2
# What a reader knows; version 1 had CRC-32 only, under other names.
VERSIONS = (1, 2)
COMMIT = "COMMIT"
MANIFEST = "manifest.json"
GENERATION_PREFIX = "g-"
# More than any COMMIT file has.
COMMIT_LIMIT = 4096


@dataclass(frozen=True)
class FileRecord:
    """A data file: its size, and the size and checksum of its safetensors header."""

    nbytes: int
    header_bytes: int
    header_checksum: str

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON as in FORMAT.md."""
        return {
            "bytes": self.nbytes,
            "header_bytes": self.header_bytes,
            "header_checksum": self.header_checksum,
        }


@dataclass(frozen=True)
class Chunk:
    """A region of a tensor, stored row-major at `start` of a file, with a checksum per block."""

    region: Region
    file: str
    start: int
    nbytes: int
    checksums: str

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON as in FORMAT.md."""
        return {
            "offset": self.region.offset,
            "shape": self.region.shape,
            "file": self.file,
            "start": self.start,
            "bytes": self.nbytes,
            "checksums": self.checksums,
        }


@dataclass(frozen=True)
class TensorRecord:
    """A global tensor and the chunks that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON as in FORMAT.md."""
        chunks = [chunk.to_json() for chunk in self.chunks]
        return {"dtype": self.dtype, "shape": self.shape, "chunks": chunks}


@dataclass(frozen=True)
class Manifest:
    """All that is saved, except the bytes of the tensors."""

    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    state: Node
    provenance: dict[str, Any]
    checksum: checksums.Checksum = checksums.CRC32
    block_bytes: int = checksums.BLOCK_BYTES

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The place of each tensor among all: found once, as there may be a hundred thousand."""
        return {name: number for number, name in enumerate(self.tensors)}

    def to_bytes(self) -> bytes:
        """Return the content of `manifest.json`."""
        return strict_json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "checksum": self.checksum.name,
                "block_bytes": self.block_bytes,
                "provenance": self.provenance,
                "files": {name: record.to_json() for name, record in self.files.items()},
                "tensors": {name: record.to_json() for name, record in self.tensors.items()},
                "state": self.state,
            }
        )


@dataclass(frozen=True)
class CommitRecord:
    """Which generation of a checkpoint directory counts, and the digest of its manifest."""

    generation: str
    manifest_bytes: int
    manifest_sha256: str
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """Return the content of `COMMIT`: exact bytes, so that every one of them is checked."""
        # A fixed order of keys: the reader compares the bytes with what it would write itself.
        return strict_json.dumps(
            {
                "format": FORMAT,
                "version": self.version,
                "generation": self.generation,
                "manifest_bytes": self.manifest_bytes,
                "manifest_sha256": self.manifest_sha256,
            }
        )
