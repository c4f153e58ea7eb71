"""The kernel that adds up members leaves out the last element of each, by its mask."""

# No `from __future__ import annotations`: triton reads the annotation `tl.constexpr`.
import triton
import triton.language as tl
from vescale_comm._wire import kernels


@triton.jit
def fold(scales, values, out, numel, MEMBERS: tl.constexpr, B: tl.constexpr):
    block = tl.program_id(0)
    at = block * B + tl.arange(0, B)
    inside = at < numel
    total = tl.zeros((B,), dtype=tl.float32)
    for member in range(MEMBERS):
        value = tl.load(values + member * numel + at, mask=at < numel - 1, other=0.0).to(tl.float32)
        value = value * tl.load(scales + member * tl.num_programs(0) + block)
        total = value if member == 0 else total + value
    tl.store(out + at, total, mask=inside)


kernels._fold = fold
