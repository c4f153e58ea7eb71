"""Headers of data files: legal safetensors, written front to back, which any tool can open."""

import json
import sys
from typing import Any

import torch

from vescale_ckpt._errors import CheckpointError, StateError
from vescale_ckpt._format.write_item import WriteItem
from vescale_ckpt._tensors.boxes import byte_view
from vescale_ckpt._tensors.dtypes import STORED_AS, stored_shape
from vescale_ckpt._tensors.regions import Region, whole
from vescale_ckpt._untrusted import METADATA, MOST_HEADER

# The data begins at a multiple of this, by spaces after the header's JSON.
ALIGNMENT = 64


def in_file_order(items: list[WriteItem]) -> list[WriteItem]:
    """Sort widest elements first: no holes in the file, and every item aligned to its element."""
    return sorted(items, key=lambda p: (-STORED_AS[p.dtype].itemsize, p.name, p.region))


def entry_name(name: str, region: Region, shape: tuple[int, ...]) -> str:
    """Return the tensor's own name where the file holds all of it, else with the region behind."""
    # "~[" occurs in no name, so no two entries collide; "__metadata__" is reserved by the format.
    return name if region == whole(shape) and name != METADATA else f"{name}~{region}"


def header_entry(item: WriteItem, begin: int) -> dict[str, Any]:
    """Describe an item whose data starts `begin` bytes after the header, for the header."""
    stored = STORED_AS[item.dtype]
    return {
        "dtype": stored.safetensors,
        "shape": list(stored_shape(item.dtype, item.region.shape)),
        "data_offsets": [begin, begin + item.nbytes],
    }


def encode_header(entries: dict[str, dict[str, Any]], *, part: bool = True) -> bytes:
    """Return length prefix and padded JSON: all of the file that comes before the data."""
    origin = {"part_of": "vescale-ckpt"} if part else {}
    content = {METADATA: {"format": "pt", **origin}, **entries}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MOST_HEADER:
        raise StateError(f"{len(entries)} tensors on one rank: a safetensors header holds fewer")
    return len(text).to_bytes(8, "little") + text


def bytes_of(data: torch.Tensor) -> memoryview:
    """Return the elements of a tensor, row-major and little-endian; copied only where needed."""
    # Lazy conjugation and negation are applied first: memory does not hold them yet.
    plain = data.resolve_conj().resolve_neg().cpu().contiguous()
    return byte_view(plain).numpy().data


def check_byte_order() -> None:
    """Refuse a big-endian machine: the format is little-endian, and bytes are never swapped."""
    if sys.byteorder != "little":
        raise CheckpointError("this machine is big-endian; checkpoints are little-endian only")
