"""Plain tensors that say in four attributes where they lie in a global tensor.

The protocol is `torch.distributed.checkpoint.CheckpointableTensor` of torch 2.14; it is read on any
torch, since nothing but the attributes makes a tensor one.
"""

import torch

from vescale_ckpt._errors import StateError
from vescale_ckpt._tensors.boxes import Box, TensorBoxes

_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def is_checkpointable(value: torch.Tensor) -> bool:
    """Return whether a tensor has all four attributes; with some of them it would be a mistake."""
    found = [name for name in _ATTRIBUTES if hasattr(value, name)]
    if found and len(found) < len(_ATTRIBUTES):
        lacking = sorted(set(_ATTRIBUTES) - set(found))
        raise StateError(
            f"a tensor has {found} of torch's CheckpointableTensor but not {lacking}: give it all "
            "four, or none if it is whole"
        )
    return bool(found)


def local_and_boxes(value: torch.Tensor) -> tuple[torch.Tensor, TensorBoxes]:
    """Return a local tensor and its boxes; `StateError` where they are not inside of it."""
    shape = tuple(value.global_shape)  # type: ignore[attr-defined]
    begins, at, sizes = (tuple(map(tuple, getattr(value, name))) for name in _ATTRIBUTES[1:])
    if not len(begins) == len(at) == len(sizes):
        raise StateError(
            f"a CheckpointableTensor has {len(begins)} global_offsets, {len(at)} local_offsets and "
            f"{len(sizes)} local_sizes: one of each is a shard"
        )
    strides = tuple(value.stride())
    boxes = []
    for begin, offset, size in zip(begins, at, sizes, strict=True):
        _check_inside(offset, size, tuple(value.shape))
        start = sum(low * step for low, step in zip(offset, strides, strict=True))
        boxes.append(Box(begin, size, start, strides))
    return value, TensorBoxes(shape, tuple(boxes))


def _check_inside(offset: tuple[int, ...], size: tuple[int, ...], local: tuple[int, ...]) -> None:
    # By dims and not by memory: what reaches past a row would be read from the next one.
    fits = len(offset) == len(size) == len(local) and all(
        low >= 0 and n >= 0 and low + n <= room
        for low, n, room in zip(offset, size, local, strict=True)
    )
    if not fits:
        raise StateError(
            f"a CheckpointableTensor has a shard of {size} at {offset} of its local tensor, which "
            f"is {local}"
        )
