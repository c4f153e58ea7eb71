"""One safetensors file: parts of its tensors are read, a new one is written tensor by tensor.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON
header, the header, and the elements of the tensors, row-major and little-endian, without gaps.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor
from vescale_rng import ShardLayout

from vescale_parallel._common.agreement import element_bytes
from vescale_parallel._errors import PretrainedError

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Dtypes by their names in the format."""

# The bound of safetensors itself.
_LONGEST_HEADER: Final = 100_000_000
_SAMPLED: Final = 64
_SCRATCH: Final = 1 << 22
"""Bytes that are read before they are copied to where they belong."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        file: the file.
        name: its name there.
        dtype: of its elements.
        shape: its shape.
        start: byte of the file at which its elements begin.
        sample: a digest of some of its bytes, by which ranks compare files with each other.
    """

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    sample: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        """Dtype and shape."""
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a file by name.

    Raises:
        PretrainedError: it is no safetensors file, or not all of one.
    """
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = os.fstat(opened.fileno()).st_size
            # Before it is read: a damaged length would ask for as much memory.
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(opened.read(length))
            found = {
                name: _sampled(opened, _stored(file, name, said, 8 + length))
                for name, said in header.items()
                if name != "__metadata__"
            }
        end = _end_without_gaps(found.values(), 8 + length)
        if end != size:
            raise ValueError(f"its tensors end at byte {end}, and the file at byte {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PretrainedError(
            f"'{file}' is no whole safetensors file: {error}. Copy or download it again."
        ) from error
    return found


def _sampled(opened: BinaryIO, stored: Stored) -> Stored:
    """Look at a few bytes at the beginning, in the middle and at the end of a tensor."""
    last = max(stored.nbytes - _SAMPLED, 0)
    size = min(stored.nbytes, _SAMPLED)
    digest = 0
    for at in (0, last // 2, last):
        # By position and not by `seek`: the file object has read ahead.
        digest = zlib.crc32(os.pread(opened.fileno(), size, stored.start + at), digest)
    return replace(stored, sample=digest)


def _end_without_gaps(tensors: Iterable[Stored], start: int) -> int:
    """Where the last of the tensors ends; a name that a header has twice leaves a gap as well."""
    at = start
    # By size as well: empty tensors begin where the next one does.
    for one in sorted(tensors, key=lambda one: (one.start, one.nbytes)):
        if one.start != at:
            raise ValueError(f"tensor '{one.name}' begins at byte {one.start} instead of {at}")
        at += one.nbytes
    return at


def _stored(file: Path, name: str, said: Any, base: int) -> Stored:
    if said["dtype"] not in DTYPES:
        raise ValueError(f"tensor '{name}' has the dtype {said['dtype']}, which torch lacks")
    shape = tuple(int(extent) for extent in said["shape"])
    begin, end = said["data_offsets"]
    one = Stored(file, name, DTYPES[said["dtype"]], shape, base + begin)
    if begin < 0 or min(shape, default=0) < 0 or end - begin != one.nbytes:
        raise ValueError(f"tensor '{name}' of {one} has {end - begin} bytes")
    return one


def fill_from_file(stored: Stored, layout: ShardLayout, local: Tensor) -> None:
    """Read the elements that a layout names into `local`, and no others.

    Memory: a few megabytes.

    Args:
        stored: the tensor in its file.
        layout: which elements, and where in `local`; of the shape that is stored.
        local: of any dtype; values are converted.

    Raises:
        PretrainedError: the file ends before them, or cannot be read.
    """
    try:
        with stored.file.open("rb") as opened, torch.no_grad():
            for box in layout.boxes:
                start = local.storage_offset() + box.local_offset
                part = local.as_strided(box.shape, box.local_strides, start)
                for offset, target in _slabs(box.global_offset, part, stored.dtype.itemsize):
                    target.copy_(_read_box(opened, stored, offset, tuple(target.shape)))
    except OSError as error:
        raise PretrainedError(f"'{stored.file}' cannot be read: {error}") from error


def _slabs(
    offset: Sequence[int], part: Tensor, itemsize: int
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Pieces of a box along its first long dim, each small enough for the scratch."""
    dim = next((d for d, extent in enumerate(part.shape) if extent > 1), None)
    if dim is None or part.numel() * itemsize <= _SCRATCH:
        yield tuple(offset), part
        return
    rows = max(1, _SCRATCH * part.shape[dim] // (part.numel() * itemsize))
    for begin in range(0, part.shape[dim], rows):
        piece = part.narrow(dim, begin, min(rows, part.shape[dim] - begin))
        moved = (*offset[:dim], offset[dim] + begin, *offset[dim + 1 :])
        if rows == 1:
            # One row is too long: it is cut along the dims that follow.
            yield from _slabs(moved, piece, itemsize)
        else:
            yield moved, piece


def _read_box(
    opened: BinaryIO, stored: Stored, offset: Sequence[int], shape: tuple[int, ...]
) -> Tensor:
    """The elements of a box, read run by run: a run is what has no gap in the file."""
    found = torch.empty(shape, dtype=stored.dtype, device="cpu")
    # As bytes: numpy has no bfloat16, and a tensor without dims cannot be seen in a smaller dtype.
    raw = found.view(-1).view(torch.uint8) if shape else found.view(1).view(torch.uint8)
    elements: Any = raw.numpy()  # a buffer, as only newer numpy says
    into = memoryview(elements)
    # The dims from `first` on are whole in the box: they, and the one before, have no gap.
    first = len(shape)
    while first and shape[first - 1] == stored.shape[first - 1]:
        first -= 1
    outer = max(first - 1, 0)
    # Those of a row-major tensor; it has no memory.
    strides = torch.empty(stored.shape, device="meta").stride()
    run = math.prod(shape[outer:]) * stored.dtype.itemsize
    for number, index in enumerate(itertools.product(*(range(n) for n in shape[:outer]))):
        whole = [o + i for o, i in zip(offset, (*index, *[0] * len(shape)), strict=False)]
        at = sum(i * step for i, step in zip(whole, strides, strict=True))
        read_into(opened, into[number * run : (number + 1) * run], stored, at)
    return found


def read_into(opened: BinaryIO, target: memoryview, stored: Stored, element: int) -> None:
    """Read bytes from an element of a tensor on, until `target` is full.

    Raises:
        PretrainedError: the file ends before.
    """
    at = stored.start + element * stored.dtype.itemsize
    done = 0
    while done < len(target):
        # It may read fewer bytes than there is room for: the rest is asked for again.
        count = os.preadv(opened.fileno(), [target[done:]], at + done)
        if not count:
            raise PretrainedError(f"'{stored.file}' ends inside of tensor '{stored.name}'.")
        done += count


def start_file(file: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> BinaryIO:
    """Make a file whose tensors are then appended in this order, each by `append`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": [*shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    # Elements begin at a multiple of eight bytes, as readers that map the file like it.
    text += b" " * (-len(text) % 8)
    opened = file.open("wb")
    opened.write(len(text).to_bytes(8, "little") + text)
    return opened


def append(opened: BinaryIO, tensor: Tensor) -> None:
    """Write the elements of the next tensor."""
    opened.write(element_bytes(tensor))
