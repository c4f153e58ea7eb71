"""Wire formats: what the elements of a floating-point tensor become while they travel."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from vescale_comm._errors import CommArgumentError
from vescale_comm._torch.compat import being_traced
from vescale_comm._wire.block_format import BLOCK, QUANTISED, blocks

Wire = Literal["fp32", "bf16", "fp8", "int8"]
"""Names of the wire formats.

A member's shard of x is encoded, sent, decoded and folded in fp32; an all-reduce encodes the folded
shard once more to send it on, so that every member has the same bits. With `a` the largest absolute
value of a block of 256 consecutive elements of a shard, one encoding of a finite x is off by at
most

- `"fp32"`: nothing (for fp64: 2**-24 |x|);
- `"bf16"`: 2**-8 |x|;
- `"fp8"` (e4m3, one fp32 scale for each block): 2**-4 |x| + 2**-10 a / 448;
- `"int8"` (one fp32 scale for each block): a / 254;

each in exact arithmetic and with room for fp32's own rounding, 2**-22 a. Blocks with an infinity or
a NaN arrive as NaN. Bytes for n elements: 4n, 2n, and n + 4 ceil(n / 256) for the other two.
"""

WIRES: tuple[str, ...] = get_args(Wire)
"""Names of the wire formats."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(slots=True, eq=False)
class Feedback:
    """Error feedback of one tensor that is reduced again and again, as a gradient is.

    What the first encoding of a call leaves out is kept and added to the input of the next, so that
    the errors of many steps do not add up (1-bit SGD, Seide et al. 2014). One for each tensor.

    Attributes:
        residual: what was left out so far, in fp32, flat; None before the first call.
    """

    residual: Tensor | None = None


def check_traceable(name: str, feedback: Feedback | None) -> None:
    """Check that a call can be written down: a graph that runs again has no place for residuals.

    Raises:
        CommArgumentError: it has error feedback.
    """
    if feedback is not None:
        raise CommArgumentError(
            f"{name}: feedback= changes from call to call and cannot be traced: leave it out, or "
            "call this outside of what is compiled"
        )


def check_wire(
    name: str, wire: str | None, op: str, x: Tensor, feedback: Feedback | None
) -> str | None:
    """Check that `x` can travel like this; return `wire`.

    Raises:
        CommArgumentError: no such format, or not for this op or dtype.
    """
    if wire is None:
        if feedback is not None:
            raise CommArgumentError(f"{name}: feedback= needs a wire format: pass wire= too")
        return None
    if wire not in WIRES:
        known = ", ".join(map(repr, WIRES))
        raise CommArgumentError(f"{name}: unknown wire format {wire!r}; there are {known}")
    if op not in ("sum", "avg") or not x.dtype.is_floating_point:
        raise CommArgumentError(
            f"{name}: wire={wire!r} carries sum and avg of floating-point tensors, not {op} of "
            f"{x.dtype}"
        )
    if being_traced(x):
        check_traceable(name, feedback)
    # A residual of another tensor would be added silently where the sizes happen to agree.
    if feedback is not None and feedback.residual is not None:
        kept = feedback.residual
        if kept.numel() != x.numel() or kept.device != x.device:
            raise CommArgumentError(
                f"{name}: the feedback is of a tensor of {kept.numel()} elements on {kept.device}, "
                f"and this one has {x.numel()} on {x.device}: use one Feedback for each tensor"
            )
    return wire


def encoded_bytes(wire: str, numel: int) -> int:
    """Return bytes of `numel` encoded elements."""
    if wire in _DTYPES:
        return numel * _DTYPES[wire].itemsize
    return numel + 4 * blocks(numel)


def encode(x: Tensor, wire: str) -> Tensor:
    """Encode contiguous fp32 elements as bytes: the scales of the blocks, then the values."""
    if wire in _DTYPES:
        return x.to(_DTYPES[wire]).view(torch.uint8)
    scales, values = quantise(x, wire)
    return torch.cat([scales.view(torch.uint8), values.view(torch.uint8)])


def decode(data: Tensor, wire: str, numel: int) -> Tensor:
    """Decode `numel` elements to fp32."""
    data = data.clone()  # a slice need not begin where fp32 may
    if wire in _DTYPES:
        return data.view(_DTYPES[wire]).to(torch.float32)
    head = 4 * blocks(numel)
    scales = data[:head].view(torch.float32)
    return dequantise(scales, data[head:].view(QUANTISED[wire][0]))


def quantise(x: Tensor, wire: str) -> tuple[Tensor, Tensor]:
    """Return the scales (fp32, one for each block) and the values of contiguous fp32 elements."""
    if x.is_cuda and has_kernels(wire, x.device):
        from vescale_comm._wire import kernels

        return kernels.quantise(x, wire)
    dtype, largest = QUANTISED[wire]
    numel = x.numel()
    # Zeros at the end: they are below every absolute value and change no block's scale.
    rows = torch.nn.functional.pad(x, (0, blocks(numel) * BLOCK - numel)).view(-1, BLOCK)
    scales = rows.abs().amax(1) / largest if numel else x.new_empty(0)
    # What a NaN is as an int8 differs from device to device, and only a scale of NaN makes it NaN.
    scales = scales.where(scales.isfinite(), torch.nan)
    # A block of zeros has scale 0; it is divided by 1 instead, so that it stays zeros.
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
    # Clamped although no quotient should exceed it: dividing rounds, and casting would wrap.
    scaled = (rows / divisors.view(-1, 1)).clamp(-largest, largest).view(-1)[:numel]
    # Rounded before the cast, which truncates; to e4m3 the cast itself rounds.
    return scales, (scaled.round() if dtype is torch.int8 else scaled).to(dtype)


def dequantise(scales: Tensor, values: Tensor) -> Tensor:
    """Return the elements in fp32."""
    numel = values.numel()
    rows = torch.nn.functional.pad(
        values.to(torch.float32), (0, blocks(numel) * BLOCK - numel)
    ).view(-1, BLOCK)
    return (rows * scales.view(-1, 1)).view(-1)[:numel]


def has_kernels(wire: str, device: torch.device) -> bool:
    """Return whether Triton is there, and has the format's dtype on this GPU."""
    # It has no e4m3 below capability 8.9, where torch's casts give the same bits.
    known = wire != "fp8" or torch.cuda.get_device_capability(device) >= (8, 9)
    return known and with_kernels()


# Once: whether it can be imported does not change, and a failed import is slow each time.
@lru_cache(maxsize=1)
def with_kernels() -> bool:
    """Return whether Triton is there."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
