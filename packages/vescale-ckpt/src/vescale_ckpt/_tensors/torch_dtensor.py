"""torch's own DTensor, read through its public attributes as boxes.

Imported only when such a tensor shows up: `torch.distributed.tensor` is slow to import.
"""

import itertools

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_ckpt._errors import StateError
from vescale_ckpt._tensors.boxes import Box, TensorBoxes

# A dim of the local tensor as the (start, length) spans of the global dim that it joins.
_Spans = list[tuple[int, int]]


def local_and_boxes(tensor: object) -> tuple[torch.Tensor, TensorBoxes]:
    """Return the local tensor of a DTensor and its boxes; `StateError` for partial placements."""
    assert isinstance(tensor, DTensor)
    local = tensor.to_local()
    # A redistribution may still be under way; its result waits when asked.
    wait = getattr(local, "wait", None)
    if wait is not None:
        local = wait()
    shape = tuple(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    # A rank outside of the mesh holds nothing, but takes part in the save.
    if coordinate is None:
        return local, TensorBoxes(shape, ())
    spans = _spans_of_dims(tensor, list(coordinate))
    if local.numel() == 0:
        return local, TensorBoxes(shape, ())
    # Checked against the real local tensor: a placement that is not known here, and divides
    # otherwise, must not be saved as something else.
    held = tuple(sum(n for _, n in dim) for dim in spans)
    if held != tuple(local.shape):
        raise StateError(
            f"DTensor of shape {shape} with placements {tensor.placements} should hold {held} "
            f"here but holds {tuple(local.shape)}"
        )
    return local, TensorBoxes(shape, _boxes(spans, tuple(local.stride())))


def _spans_of_dims(tensor: DTensor, coordinate: list[int]) -> list[_Spans]:
    spans: list[_Spans] = [[(0, n)] for n in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise StateError(
                f"a DTensor that is {placement} over mesh axis {axis} is not yet its own value: "
                "redistribute it to Shard or Replicate first"
            )
        # Strided shards (FSDP2 over TP): first divided into `split_factor` parts, of each of which
        # this rank has a share.
        factor = int(getattr(placement, "split_factor", 1))
        size = tensor.device_mesh.size(axis)
        parts = _chunk(spans[dim], factor)
        spans[dim] = [p for part in parts for p in _chunk(part, size)[coordinate[axis]]]
    return spans


def _chunk(spans: _Spans, count: int) -> list[_Spans]:
    """Divide a joined dim into `count` parts by the rule of `torch.chunk`, empty ones last."""
    total = sum(n for _, n in spans)
    share = -(-total // count)
    return [_slice(spans, i * share, min((i + 1) * share, total)) for i in range(count)]


def _slice(spans: _Spans, begin: int, end: int) -> _Spans:
    found, position = [], 0
    for start, length in spans:
        low, high = max(begin - position, 0), min(end - position, length)
        if low < high:
            found.append((start + low, high - low))
        position += length
    return found


def _boxes(spans: list[_Spans], strides: tuple[int, ...]) -> tuple[Box, ...]:
    """Return one box for every combination of the dims' spans."""
    located = []
    for dim in spans:
        local_starts = itertools.accumulate((n for _, n in dim), initial=0)
        located.append([(g, n, at) for (g, n), at in zip(dim, local_starts, strict=False)])
    return tuple(
        Box(
            global_offset=tuple(g for g, _, _ in combination),
            shape=tuple(n for _, n, _ in combination),
            local_offset=sum(at * s for (_, _, at), s in zip(combination, strides, strict=True)),
            local_strides=strides,
        )
        for combination in itertools.product(*located)
    )
