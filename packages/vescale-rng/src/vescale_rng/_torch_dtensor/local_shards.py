"""Plain tensors that are shards of more than a batch: what `to_local` gives of a sharded DTensor.

The tensor parallelism of torch hands on such tensors by default (`ColwiseParallel`), and nothing in
them says which hidden units or tokens they hold. So they are marked, and so is what is computed of
them: what is drawn into one is refused, as its place in one device's tensor cannot be known.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_rng._torch_dtensor.data_axes import DataAxes

# Kept on the storage, which a tensor shares with its views, `detach()` and autograd's copies of it.
_MARK = "_vescale_rng_local_shard"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# What these collectives return, every rank has.
_WHOLE = ("allgather", "all_gather", "allreduce", "all_reduce", "broadcast")
_OF_A_SHAPE = ("aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full")


def note_local(source: DTensor, local: torch.Tensor, data: DataAxes) -> bool:
    """Mark the local tensor that was taken of a DTensor, and tell whether it is a shard.

    Args:
        source: what `local` was taken of.
        local: the result of `to_local`.
        data: the axes that divide the batch: to be divided by them is to be rows of it.
    """
    mesh = source.device_mesh
    # The weights of FSDP are divided by the data ranks, and are no rows.
    axes = range(mesh.ndim) if isinstance(source, torch.nn.Parameter) else data.others(mesh)
    shard = any(not isinstance(source.placements[a], Replicate) for a in axes if mesh.size(a) > 1)
    # Written also where it is none: the memory may have been a shard's before.
    if shard or is_local_shard(local):
        _set(local, shard)
    return shard


def is_local_shard(tensor: Any) -> bool:
    """Tell whether a tensor is a shard of another than the batch, or was computed of one."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
        return False
    return bool(getattr(_keeper(tensor), _MARK, False))


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Mark what an op of ATen made of shards, or wrote of them."""
    if func.namespace in _COLLECTIVES and any(name in str(func) for name in _WHOLE):
        for whole in _tensors(result):
            _set(whole, False)
        return
    shard = next((x for x in _tensors((args, kwargs)) if is_local_shard(x)), None)
    if shard is None:
        return
    name = func._schema.name
    if name in _OF_A_SHAPE and tuple(result.shape) != tuple(shard.shape):
        return  # one number for each row, say: `x.new_empty((len(x), 1))`
    for made in _tensors(result):
        if not isinstance(made, DTensor):
            _set(made, True)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def _keeper(tensor: torch.Tensor) -> Any:
    """Return what the mark is kept on: the storage, or the tensor itself where it is a wrapper."""
    return tensor.untyped_storage() if type(tensor) in _PLAIN else tensor


def _set(tensor: torch.Tensor, shard: bool) -> None:
    setattr(_keeper(tensor), _MARK, shard)
