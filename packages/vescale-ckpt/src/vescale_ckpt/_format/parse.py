"""Parses the bytes of a manifest or commit record; what breaks a rule of FORMAT.md is an error.

Nothing here trusts its input: a manifest may come from anywhere. Every error is a `FormatError`.
"""

import math
import re
from typing import Any, NamedTuple, TypeVar

from vescale_ckpt._errors import FormatError, UnsupportedError
from vescale_ckpt._format import checksums, strict_json
from vescale_ckpt._format.checksums import Checksum
from vescale_ckpt._format.manifest import (
    FORMAT,
    VERSIONS,
    Chunk,
    CommitRecord,
    FileRecord,
    Manifest,
    TensorRecord,
)
from vescale_ckpt._format.parse_state import check_state
from vescale_ckpt._tensors.dtypes import STORED_AS, stored_shape
from vescale_ckpt._tensors.regions import Region, first_overlap
from vescale_ckpt._untrusted import MOST_BYTES, MOST_HEADER, bytes_of_shape

# No path can leave the generation's directory: a name has no separator and no leading dot.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors", re.ASCII)
_GENERATION = re.compile(r"g-[0-9a-f]{16}", re.ASCII)
_HEX = re.compile(r"[0-9a-f]*", re.ASCII)

_T = TypeVar("_T")


class _FieldNames(NamedTuple):
    """What a version of the format calls its checksums, and whether it names their kind."""

    header: str
    chunk: str
    named: bool


_FIELD_NAMES = {
    1: _FieldNames("header_crc32", "crc32", named=False),
    2: _FieldNames("header_checksum", "checksums", named=True),
}


def parse_commit(data: bytes) -> CommitRecord:
    """Parse `COMMIT`; any byte that is not as the format writes it is an error."""
    fields = strict_json.loads(data, "COMMIT")
    version = _version_of(fields, "COMMIT")
    record = CommitRecord(
        generation=_field(fields, "generation", str, "COMMIT"),
        manifest_bytes=_field(fields, "manifest_bytes", int, "COMMIT"),
        manifest_sha256=_field(fields, "manifest_sha256", str, "COMMIT"),
        version=version,
    )
    if not _GENERATION.fullmatch(record.generation):
        raise FormatError(f"COMMIT: {record.generation[:80]!r} is not a generation")
    # Written again and compared: a flipped bit that still parses is found, too, without a checksum.
    if not 0 < record.manifest_bytes <= MOST_BYTES or record.to_bytes() != data:
        raise FormatError("COMMIT: not in the one form that the format allows")
    return record


def is_generation(name: str) -> bool:
    """Return whether a name in a checkpoint directory is that of a generation."""
    return _GENERATION.fullmatch(name) is not None


def parse_manifest(data: bytes) -> Manifest:
    """Parse `manifest.json` and check all that can be checked without the data files."""
    where = "manifest.json"
    top = strict_json.loads(data, where)
    words = _FIELD_NAMES[_version_of(top, where)]
    checksum = checksums.named(top.get("checksum") if words.named else checksums.CRC32.name)
    block = _field(top, "block_bytes", int, where)
    # A multiple of 16: a block then begins at an element, whatever the dtype.
    if not 1024 <= block <= 1 << 30 or block % 16:
        raise FormatError(f"{where}: block_bytes {block} is not a multiple of 16 in 1 KiB..1 GiB")
    # Bottom up: each part is checked by itself before anything refers to it.
    files = {
        name: _parse_file(name, record, checksum, words)
        for name, record in _field(top, "files", dict, where).items()
    }
    tensors = {
        name: _parse_tensor(name, record, block, checksum, words)
        for name, record in _field(top, "tensors", dict, where).items()
    }
    # From here on every reference between files, tensors and state is known to be good.
    _check_tiling(files, tensors)
    state = check_state(top.get("state"), set(tensors))
    provenance = _field(top, "provenance", dict, where)
    if any(isinstance(value, (dict, list)) for value in provenance.values()):
        raise FormatError(f"{where}: 'provenance' must hold plain values only")
    return Manifest(files, tensors, state, provenance, checksum, block)


def _version_of(fields: Any, where: str) -> int:
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise FormatError(f"{where}: this is not a {FORMAT} file")
    version = fields.get("version")
    if version not in VERSIONS or type(version) is not int:
        known = " and ".join(map(str, VERSIONS))
        said = f"{where}: format version {version!r:.40}; this reader knows {known}"
        if type(version) is int and version > max(VERSIONS):
            raise UnsupportedError(f"{said}: install a newer vescale-ckpt")
        raise FormatError(said)
    return version


def _field(fields: Any, key: str, kind: type[_T], where: str) -> _T:
    if not isinstance(fields, dict) or key not in fields:
        raise FormatError(f"{where}: {key!r} is missing")
    value = fields[key]
    # The exact type: in Python a bool passes for an int.
    if type(value) is not kind:
        raise FormatError(f"{where}: {key!r} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _size(fields: Any, key: str, where: str) -> int:
    value = _field(fields, key, int, where)
    if not 0 <= value <= MOST_BYTES:
        raise FormatError(f"{where}: {key!r} is {value:.6g}: out of range")
    return value


def _parse_file(name: str, fields: Any, checksum: Checksum, words: _FieldNames) -> FileRecord:
    where = f"file {name[:80]!r}"
    if not _FILE_NAME.fullmatch(name):
        raise FormatError(f"{where}: not a legal file name (letters, digits, '.', '_', '-' only)")
    record = FileRecord(
        nbytes=_size(fields, "bytes", where),
        header_bytes=_size(fields, "header_bytes", where),
        header_checksum=_digits(fields, words.header, checksum.digits, where),
    )
    if not 8 < record.header_bytes <= min(record.nbytes, 8 + MOST_HEADER):
        raise FormatError(f"{where}: a header of {record.header_bytes} bytes makes no sense")
    return record


def _digits(fields: Any, key: str, expected: int, where: str) -> str:
    digits = _field(fields, key, str, where)
    _check_hex(digits, key, expected, where)
    return digits


def _check_hex(digits: str, key: str, expected: int, where: str) -> None:
    if len(digits) != expected or not _HEX.fullmatch(digits):
        raise FormatError(f"{where}: {key!r} must be {expected} lower-case hexadecimal digits")


def _parse_tensor(
    name: str, fields: Any, block: int, checksum: Checksum, words: _FieldNames
) -> TensorRecord:
    where = f"tensor {name[:80]!r}"
    dtype = _field(fields, "dtype", str, where)
    if dtype not in STORED_AS:
        raise FormatError(f"{where}: unknown dtype {dtype[:40]!r}")
    itemsize = STORED_AS[dtype].bytes_per_element
    shape = _dims(fields, "shape", where)
    if bytes_of_shape(stored_shape(dtype, shape), STORED_AS[dtype].itemsize) is None:
        raise FormatError(f"{where}: shape with {len(shape)} dims is too large to be real")
    chunks = tuple(
        _parse_chunk(chunk, shape, itemsize, where, words.chunk)
        for chunk in _field(fields, "chunks", list, where)
    )
    for chunk in chunks:
        expected = checksum.digits_for(chunk.nbytes, block)
        _check_hex(chunk.checksums, words.chunk, expected, where)
    regions = [chunk.region for chunk in chunks]
    # No overlap, and as many elements as the tensor: then they cover it.
    clash = first_overlap(regions)
    if clash is not None:
        raise FormatError(f"{where}: chunks {clash[0]} and {clash[1]} overlap")
    if sum(region.numel for region in regions) != math.prod(shape):
        raise FormatError(f"{where}: its chunks do not cover the shape {shape}")
    return TensorRecord(dtype, shape, chunks)


def _parse_chunk(
    fields: Any, shape: tuple[int, ...], itemsize: int, where: str, checksums: str
) -> Chunk:
    region = Region(_dims(fields, "offset", where), _dims(fields, "shape", where))
    if not len(region.offset) == len(region.shape) == len(shape):
        raise FormatError(f"{where}: a chunk has another number of dims than the tensor")
    ends = zip(region.offset, region.shape, shape, strict=True)
    if any(n == 0 or o + n > total for o, n, total in ends):
        raise FormatError(f"{where}: chunk {region} is empty or outside the shape {shape}")
    nbytes = _size(fields, "bytes", where)
    if nbytes != region.numel * itemsize:
        raise FormatError(f"{where}: chunk {region} has {nbytes} bytes")
    return Chunk(
        region=region,
        file=_field(fields, "file", str, where),
        start=_size(fields, "start", where),
        nbytes=nbytes,
        checksums=_field(fields, checksums, str, where),
    )


def _dims(fields: Any, key: str, where: str) -> tuple[int, ...]:
    dims = _field(fields, key, list, where)
    if any(type(n) is not int or not 0 <= n <= MOST_BYTES for n in dims):
        raise FormatError(f"{where}: {key!r} must be a list of non-negative integers")
    return tuple(dims)


def _check_tiling(files: dict[str, FileRecord], tensors: dict[str, TensorRecord]) -> None:
    """Check that in every file the chunks follow each other without gap or overlap.

    So every byte of every file is under exactly one checksum.
    """
    by_file: dict[str, list[Chunk]] = {name: [] for name in files}
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if chunk.file not in by_file:
                raise FormatError(f"tensor {name[:80]!r}: file {chunk.file[:80]!r} is not listed")
            by_file[chunk.file].append(chunk)
    for name, chunks in by_file.items():
        # The data begins where the header ends, as in every safetensors file.
        position = files[name].header_bytes
        for chunk in sorted(chunks, key=lambda c: c.start):
            if chunk.start != position:
                raise FormatError(
                    f"file {name!r}: a chunk starts at byte {chunk.start}, where {position} is due"
                )
            position += chunk.nbytes
        if position != files[name].nbytes:
            raise FormatError(f"file {name!r}: bytes {position} to its end belong to no tensor")
