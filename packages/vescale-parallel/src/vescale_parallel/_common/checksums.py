"""Tensors in words that ranks can compare: their forms, and checksums of their values."""

import zlib
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

CHECKED_BATCHES: Final = 2
"""How many batches are compared between ranks: a loader that is wrong is wrong from the start."""


def forms(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Shapes and dtypes, by name."""
    return {name: f"{tuple(one.shape)} {one.dtype}" for name, one in tensors.items()}


def values(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Checksums, by name."""
    return {name: f"checksum {checksum(one):08x}" for name, one in tensors.items()}


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of the elements, in row-major order."""
    return zlib.crc32(element_bytes(tensor))


def element_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, in row-major order, of any dtype."""
    # Sparse tensors and lazy conjugates have no bytes that could be seen as they are.
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = dense.resolve_conj().resolve_neg().contiguous().flatten().cpu()
    # A single element may have any stride, and is seen as bytes with that of one alone.
    flat = flat.as_strided(flat.shape, (1,))
    # numpy has no bfloat16 and no float8; every dtype can be seen as bytes.
    return flat.view(torch.uint8).numpy().data
