"""Boxes of a global tensor that a rank holds, and how they are stored in its local tensor."""

from dataclasses import dataclass

import torch

from vescale_ckpt._tensors.regions import Region, Shape


@dataclass(frozen=True)
class Box:
    """A box of the global tensor, and where its elements are in the local one (in elements)."""

    global_offset: Shape
    shape: Shape
    local_offset: int
    local_strides: Shape


@dataclass(frozen=True)
class TensorBoxes:
    """All boxes that this rank holds. `declared` is false where copies are only presumed."""

    global_shape: Shape
    boxes: tuple[Box, ...]
    declared: bool = True


def box_view(local: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the elements of `box`, as a view of the local tensor."""
    # `as_strided` counts from the storage, boxes from the local tensor.
    offset = local.storage_offset() + box.local_offset
    return local.as_strided(box.shape, box.local_strides, offset)


def byte_view(contiguous: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as a view of it."""
    # A tensor of one element is contiguous whatever its strides are, but `view` wants a stride of 1
    # to change the size of elements.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def region_of(box: Box) -> Region:
    """Return where a box is in the global tensor."""
    return Region(box.global_offset, box.shape)


def narrow_to(tensor: torch.Tensor, region: Region, part: Region) -> torch.Tensor:
    """Return the elements of `part`, as a view of a tensor that holds `region`."""
    for dim, (start, base) in enumerate(zip(part.offset, region.offset, strict=True)):
        if part.shape[dim] != region.shape[dim]:
            tensor = tensor.narrow(dim, start - base, part.shape[dim])
    return tensor
