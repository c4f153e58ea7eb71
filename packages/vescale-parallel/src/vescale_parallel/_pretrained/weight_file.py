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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor
from vescale_rng import ShardLayout

from vescale_parallel._common.agreement import element_bytes
from vescale_parallel._errors import PretrainedError
from vescale_parallel._untrusted import DTYPES, open_regular, read_header

_SAMPLED: Final = 64
_SCRATCH: Final = 1 << 22
"""Bytes that are read before they are copied to where they belong."""


@dataclass(frozen=True)
class FileTensor:
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


def stored_tensors(file: Path) -> dict[str, FileTensor]:
    """The tensors of a file by name.

    Raises:
        PretrainedError: it is no safetensors file, or not all of one.
    """
    try:
        with open_regular(file) as opened:
            header, begin = read_header(opened)
            return {
                name: _sampled(
                    opened, FileTensor(file, name, DTYPES[one.dtype], one.shape, begin + one.begin)
                )
                for name, one in header.items()
            }
    except (OSError, ValueError) as error:
        raise PretrainedError(
            f"'{file}' is no whole safetensors file: {error}. Copy or download it again."
        ) from error


def _sampled(opened: BinaryIO, stored: FileTensor) -> FileTensor:
    """Look at a few bytes at the beginning, in the middle and at the end of a tensor."""
    last = max(stored.nbytes - _SAMPLED, 0)
    size = min(stored.nbytes, _SAMPLED)
    digest = 0
    for at in (0, last // 2, last):
        digest = zlib.crc32(os.pread(opened.fileno(), size, stored.start + at), digest)
    return replace(stored, sample=digest)


def fill_from_file(stored: FileTensor, layout: ShardLayout, local: Tensor) -> None:
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
        with open_regular(stored.file) as opened, torch.no_grad():
            for box in layout.boxes:
                start = local.storage_offset() + box.local_offset
                part = local.as_strided(box.shape, box.local_strides, start)
                for offset, target in _slabs(box.global_offset, part, stored.dtype.itemsize):
                    target.copy_(_read_box(opened, stored, offset, tuple(target.shape)))
    except (OSError, ValueError) as error:
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
    opened: BinaryIO, stored: FileTensor, offset: Sequence[int], shape: tuple[int, ...]
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


def read_into(opened: BinaryIO, target: memoryview, stored: FileTensor, element: int) -> None:
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
