"""Placements, and the parts of a tensor that a rank holds. Also read by `tools/first_gpu`."""

from dataclasses import dataclass

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Shard:
    """A placement that shards `dim`, evenly cut into `blocks` blocks first."""

    dim: int
    blocks: int = 1


@dataclass(frozen=True)
class Replicate:
    """A placement that copies."""


def strided(shape, order, dtype, device=None):
    """An empty dense tensor whose dims lie in memory in `order`."""
    order = order or tuple(range(len(shape)))
    base = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
    return base.permute([order.index(dim) for dim in range(len(shape))])


def boxes_of(local, layout):
    """Pairs of (global slices, view of the local tensor)."""
    for box in layout.boxes:
        view = local.as_strided(
            box.shape, box.local_strides, local.storage_offset() + box.local_offset
        )
        slices = zip(box.global_offset, box.shape, strict=True)
        yield tuple(slice(o, o + n) for o, n in slices), view
