"""New tensors in which the boxes of a layout are where they are in a given local tensor."""

from dataclasses import replace

import torch

from vescale_rng._layout.layout import Box, ShardLayout, dense_strides

# Whether the local tensor is one box, and the layout of a new one like it.
Likeness = tuple[bool, ShardLayout]


def make_like(
    local: torch.Tensor,
    layout: ShardLayout,
    dtype: torch.dtype | None = None,
    *,
    row_major: bool = False,
) -> tuple[torch.Tensor, ShardLayout]:
    """Return an empty tensor like `local`, and the layout that it has.

    Args:
        local: this rank's elements.
        layout: which they are.
        dtype: of the new tensor; None is that of `local`.
        row_major: whether the new tensor is row-major on one device, as the results of torch's
            out-of-place random functions are; else it has the strides of the given one.
    """
    shape, strides = local.shape, local.stride()
    key = ("like", shape, strides, row_major)
    one_box, found = layout.remembered(key, lambda: _likeness(local, layout, row_major))
    dtype = dtype or local.dtype
    if not one_box:
        return torch.empty_strided(shape, strides, dtype=dtype, device=local.device), found
    if row_major:
        return torch.empty(shape, dtype=dtype, device=local.device), found
    return torch.empty_like(local, dtype=dtype, requires_grad=False), found


def make_new(
    shape: torch.Size,
    layout: ShardLayout,
    dtype: torch.dtype | None,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, ShardLayout]:
    """Return an empty tensor of a local shape, row-major on one device, and the layout that it has.

    Where the layout has several boxes, they are in a tensor without gaps in its memory order.
    """
    strides = dense_strides(shape, layout.memory_order)
    boxes = layout.boxes
    if len(boxes) == 1 and boxes[0].shape == shape:
        strides = dense_strides(shape)
        boxes = (Box(boxes[0].global_offset, boxes[0].shape, 0, strides),)
    local = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return local, replace(layout, boxes=boxes, memory_order=None)


def _likeness(local: torch.Tensor, layout: ShardLayout, row_major: bool) -> Likeness:
    order = None if row_major else layout.memory_order
    if not is_one_box(local, layout):
        return False, replace(layout, memory_order=order)
    # The usual case: free to choose the strides, which for an expanded local one must.
    memory = torch.contiguous_format if row_major else torch.preserve_format
    # torch decides what an empty_like of these strides is; on meta nothing is allocated.
    strides = torch.empty_like(local, device="meta", memory_format=memory).stride()
    box = layout.boxes[0]
    if box.local_strides == strides and layout.memory_order == order:
        return True, layout
    box = Box(box.global_offset, box.shape, 0, strides)
    return True, replace(layout, boxes=(box,), memory_order=order)


def is_one_box(local: torch.Tensor, layout: ShardLayout) -> bool:
    """Tell whether the local tensor, index for index, is the one box of its layout."""
    if len(layout.boxes) != 1 or layout.boxes[0].shape != local.shape:
        return False
    box = layout.boxes[0]
    sides = zip(box.shape, box.local_strides, local.stride(), strict=True)
    return box.local_offset == 0 and all(a == b for n, a, b in sides if n > 1)
