"""Short notation of layouts and dtypes, as `repr` and errors print them: `f32[8@dp, 4@tp]`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.mesh import axis_names
from vescale_dtensor._layout.placement_base import Sharded
from vescale_dtensor._layout.placements import Partial
from vescale_dtensor._layout.shard_geometry import dim_groups

_SHORT_DTYPE = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def short(shape: Sequence[int], dtype: torch.dtype, layout: Layout) -> str:
    """Return the short global form: `f32[8@dp, 4@tp], +cp` (sharded dims, then partial axes)."""
    dims = [str(extent) for extent in shape]
    partial = ""
    for group in dim_groups(layout.placements, len(dims)):
        # Dims that are sharded as one stand in parentheses, with the axis after the last of them.
        if len(group) > 1:
            dims[group[0]], dims[group[-1]] = f"({dims[group[0]]}", f"{dims[group[-1]]})"
    for name, placement in zip(axis_names(layout.mesh), layout.placements, strict=True):
        if isinstance(placement, Sharded):
            dims[placement.cut_dims()[-1]] += f"@{name}"
        elif isinstance(placement, Partial):
            sign = "+" if placement.reduce_op == "sum" else f"{placement.reduce_op}:"
            partial += f", {sign}{name}"
    return f"{short_dtype(dtype)}[{', '.join(dims)}]{partial}"


def short_dtype(dtype: torch.dtype) -> str:
    """Return `f32` for torch.float32, and so on; other dtypes by their names."""
    return _SHORT_DTYPE.get(dtype, str(dtype).removeprefix("torch."))
