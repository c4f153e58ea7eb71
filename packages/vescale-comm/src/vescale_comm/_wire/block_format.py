"""The layout of block-scaled wire formats: what the torch path and the Triton kernels share."""

import torch

BLOCK = 256
"""Elements that share a scale."""

QUANTISED = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
"""For each format the dtype of the values and the largest one."""


def blocks(numel: int) -> int:
    """Number of blocks of `numel` elements."""
    return -(-numel // BLOCK)
