"""Triton kernels of the block-scaled wire formats: the same bits as the torch path.

One program for each block of a row. Divisions round as IEEE's do and nothing is fused, or the bits
would depend on the device.
"""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vescale_comm._wire.block_format import BLOCK, QUANTISED, blocks


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]
    x, scales, values, numel, LARGEST: tl.constexpr, WHOLE: tl.constexpr, B: tl.constexpr
):
    # Elements are counted in 64 bits: there may be more of them than 32 have a number for.
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < numel
    element = tl.load(x + at, mask=inside, other=0.0)
    # The largest as an integer: of non-negative floats the bits are in the order of the values,
    # and those of a NaN are above all others, where a maximum of floats might drop it.
    bits = tl.max(tl.abs(element).to(tl.int32, bitcast=True), axis=0)
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), LARGEST)
    # From infinity's bits on. What a NaN is as an integer differs from device to device, and only a
    # scale of NaN makes all of them NaN again.
    scale = tl.where(bits >= 0x7F800000, float("nan"), scale)
    tl.store(scales + tl.program_id(0), scale)
    scaled = tl.div_rn(element, tl.where(scale == 0.0, 1.0, scale))
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if WHOLE:  # adding 1.5 * 2**23 leaves no bits for a fraction: rounds half to even
        scaled = (scaled + 12582912.0) - 12582912.0
    tl.store(values + at, scaled.to(values.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _fold(scales, values, out, numel, MEMBERS: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < numel
    # A member's row begins where that of the one before ends: pointers add up in 64 bits, and
    # `member * numel` would not.
    row = values + at
    scale = scales + tl.program_id(0)
    total = tl.zeros((B,), dtype=tl.float32)
    for member in range(MEMBERS):
        value = tl.load(row, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
        row += numel
        scale += tl.num_programs(0)
        # The first is copied and not added: 0 + -0 would be 0.
        total = value if member == 0 else total + value
    tl.store(out + at, total, mask=inside)


def quantise(x: Tensor, wire: str) -> tuple[Tensor, Tensor]:
    """Return the scales (fp32, one for each block) and the values of contiguous fp32 elements."""
    dtype, largest = QUANTISED[wire]
    scales, values = x.new_empty(blocks(x.numel())), torch.empty_like(x, dtype=dtype)
    if x.numel():
        _launch(_quantise, x, scales, values, x.numel(), LARGEST=largest, WHOLE=dtype is torch.int8)
    return scales, values


def fold(scales: Tensor, values: Tensor) -> Tensor:
    """Decode the members' rows and add them up, first to last.

    Args:
        scales: (members, blocks) in fp32.
        values: (members, numel).

    Returns:
        (numel,) in fp32.
    """
    members, numel = values.shape
    out = scales.new_empty(numel)
    if numel:
        _launch(_fold, scales.contiguous(), values.contiguous(), out, numel, MEMBERS=members)
    return out


def _launch(kernel: Any, *args: Any, **constants: Any) -> None:
    numel = next(each for each in args if isinstance(each, int))
    device = args[0].device
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[blocks(numel),](*args, B=BLOCK, enable_fp_fusion=False, **constants)
