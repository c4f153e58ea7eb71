"""Checksums of a stretch of bytes, one per block, as one string of hexadecimal digits."""

import zlib

NAME = "crc32"
DIGITS = 8
# Small enough that a partial read verifies little more than it needs, large enough that the
# checksums of a terabyte still fit in a few tens of megabytes.
BLOCK_BYTES = 256 << 10


def of_block(data: bytes | bytearray | memoryview) -> str:
    """The checksum of one block."""
    return f"{zlib.crc32(data):08x}"


def of_blocks(data: memoryview, block_bytes: int = BLOCK_BYTES) -> str:
    """The checksums of all blocks of `data`; the last block may be short."""
    starts = range(0, data.nbytes, block_bytes)
    return "".join(of_block(data[start : start + block_bytes]) for start in starts)


def digits_for(nbytes: int, block_bytes: int) -> int:
    """How many digits the checksums of `nbytes` bytes take."""
    return -(-nbytes // block_bytes) * DIGITS


def nth(checksums: str, block: int) -> str:
    """The checksum of block number `block`."""
    return checksums[block * DIGITS : (block + 1) * DIGITS]
