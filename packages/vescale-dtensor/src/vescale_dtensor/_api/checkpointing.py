"""Gives DTensors the three methods by which torch.distributed.checkpoint saves and loads.

It looks them up by name on any tensor (torch/distributed/_checkpointable.py), before it looks for
what `CheckpointableTensor` of torch 2.14 describes. Those attributes say where a *local* tensor
lies, by offsets into its own size; a DTensor has the global size, and the pieces of a ragged shard
have no local tensor of that many dims. So DTensors answer with views instead, one for each box.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vescale_dtensor._autograd.local_use import local_outside_autograd
from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.protocol import HeldBox, ShardLayout
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._tensor.state import local_escaped

# torch's own import of it is slow, and only who saves needs it.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def create_write_items(self: DTensor, fqn: str, object: object) -> list[WriteItem]:
    """Return one item for each box that this rank holds; of copies, torch writes one."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    layout = _layout(self, f"saving {fqn}")
    properties = TensorProperties.create_from_tensor(self._local_tensor.detach())
    size = torch.Size(layout.global_shape)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets, number),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for number, chunk in enumerate(_chunks(layout))
    ]


def create_chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
    """Return the boxes that this rank holds, which are to be filled."""
    return _chunks(_layout(self, "loading"))


def get_tensor_shard(self: DTensor, index: MetadataIndex) -> Tensor:
    """Return this rank's memory of the box that an index names, to read or to fill."""
    layout = _layout(self, f"reading {index.fqn}")
    for box in _boxes(layout):
        if index.offset is None or tuple(index.offset) == box.global_offset:
            local_escaped(self)
            local = local_outside_autograd(self).detach()
            start = local.storage_offset() + box.local_offset
            return local.as_strided(box.shape, box.local_strides, start)
    raise LayoutError(
        f"{index.fqn}: this rank holds no box of {self!r} that begins at {index.offset}, but "
        f"{[box.global_offset for box in layout.boxes]}. A plan is for the layout that it was "
        "made of: plan again once a tensor was redistributed"
    )


def _layout(tensor: DTensor, doing: str) -> ShardLayout:
    if tensor._spec.layout.partial:
        raise LayoutError(
            f"{doing}: {tensor!r} is partial, so each rank holds a summand of it: redistribute it "
            "to Replicate() or Shard() first"
        )
    return tensor.__vescale_layout__()


def _boxes(layout: ShardLayout) -> tuple[HeldBox, ...]:
    """The boxes of a rank; of a tensor without elements, which nobody holds, one empty box."""
    if torch.Size(layout.global_shape).numel():
        return layout.boxes
    shape = layout.global_shape
    return (HeldBox((0,) * len(shape), shape, 0, (0,) * len(shape)),)


def _chunks(layout: ShardLayout) -> list[ChunkStorageMetadata]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.global_offset), torch.Size(box.shape))
        for box in _boxes(layout)
    ]


METHODS = {
    "__create_write_items__": create_write_items,
    "__create_chunk_list__": create_chunk_list,
    "__get_tensor_shard__": get_tensor_shard,
}
"""What `_api/methods.py` installs on the class, by name."""
