"""Checksums of a stretch of bytes, one per block, as one string of hexadecimal digits."""

import importlib
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vescale_ckpt._errors import FormatError, UnsupportedError

Bytes = bytes | bytearray | memoryview
# Small enough that a partial read verifies little more than it needs, large enough that the
# checksums of a terabyte still fit in a few tens of megabytes.
BLOCK_BYTES = 256 << 10


@dataclass(frozen=True)
class Checksum:
    """One way to compute them; `of_block` gives `digits` hexadecimal digits."""

    name: str
    digits: int
    of_block: Callable[[Bytes], str]

    def of_blocks(self, data: memoryview, block_bytes: int = BLOCK_BYTES) -> str:
        """Return the checksums of all blocks of `data`; the last block may be short."""
        starts = range(0, data.nbytes, block_bytes)
        return "".join(self.of_block(data[start : start + block_bytes]) for start in starts)

    def digits_for(self, nbytes: int, block_bytes: int) -> int:
        """Return how many digits the checksums of `nbytes` bytes have."""
        return -(-nbytes // block_bytes) * self.digits

    def nth(self, checksums: str, block: int) -> str:
        """Return the checksum of block number `block`."""
        return checksums[block * self.digits : (block + 1) * self.digits]


def _crc32(data: Bytes) -> str:
    return f"{zlib.crc32(data):08x}"


CRC32 = Checksum("crc32", 8, _crc32)
# Ten times as fast as CRC-32, where the package xxhash is installed.
XXH3 = "xxh3_64"
NAMES = (CRC32.name, XXH3)


def fastest() -> Checksum:
    """Return the fastest one that this process can compute."""
    return _xxh3() or CRC32


def agreed(names: Iterable[str]) -> Checksum:
    """Return the one that all ranks can compute, where each tells its fastest."""
    # XXH3 only if all ranks have it: one manifest names one kind of checksum.
    return (_xxh3() if set(names) == {XXH3} else None) or CRC32


def named(name: object) -> Checksum:
    """Return the one that a manifest names; `UnsupportedError` if it cannot be computed here."""
    if name == CRC32.name:
        return CRC32
    if name != XXH3:
        raise FormatError(f"unknown checksum {name!r:.40}; this reader knows {', '.join(NAMES)}")
    found = _xxh3()
    if found is None:
        raise UnsupportedError(
            "this checkpoint was saved with xxh3_64 checksums, and nothing is read unverified: "
            "pip install xxhash"
        )
    return found


def _xxh3() -> Checksum | None:
    try:
        xxhash = importlib.import_module("xxhash")
    except ImportError:
        return None
    return Checksum(XXH3, 16, xxhash.xxh3_64_hexdigest)
