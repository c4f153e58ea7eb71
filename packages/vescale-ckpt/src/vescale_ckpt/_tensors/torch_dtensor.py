"""torch's own DTensor, read through its public attributes as boxes.

Imported only when such a tensor shows up: `torch.distributed.tensor` is slow to import.
"""

import itertools

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_ckpt._errors import StateError
from vescale_ckpt._tensors.boxes import Box, Layout

# A dim of the local tensor as the (start, length) pieces of the global dim that it joins.
_Pieces = list[tuple[int, int]]


def local_and_layout(tensor: object) -> tuple[torch.Tensor, Layout]:
    """The local tensor of a DTensor and its boxes; raises for placements that are not data."""
    assert isinstance(tensor, DTensor)
    local = tensor.to_local()
    # A redistribution may still be under way; its result waits when asked.
    wait = getattr(local, "wait", None)
    if wait is not None:
        local = wait()
    shape = tuple(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return local, Layout(shape, ())
    pieces = _pieces_of_dims(tensor, list(coordinate))
    if local.numel() == 0:
        return local, Layout(shape, ())
    held = tuple(sum(n for _, n in dim) for dim in pieces)
    if held != tuple(local.shape):
        raise StateError(
            f"DTensor of shape {shape} with placements {tensor.placements} should hold {held} "
            f"here but holds {tuple(local.shape)}"
        )
    return local, Layout(shape, _boxes(pieces, tuple(local.stride())))


def _pieces_of_dims(tensor: DTensor, coordinate: list[int]) -> list[_Pieces]:
    pieces: list[_Pieces] = [[(0, n)] for n in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise StateError(
                f"a DTensor that is {placement} over mesh axis {axis} is not yet its own value: "
                "redistribute it to Shard or Replicate first"
            )
        # FSDP2 over TP: cut into split_factor parts first, then take this rank's share of each.
        factor = int(getattr(placement, "split_factor", 1))
        size = tensor.device_mesh.size(axis)
        parts = _cut(pieces[dim], factor)
        pieces[dim] = [p for part in parts for p in _cut(part, size)[coordinate[axis]]]
    return pieces


def _cut(pieces: _Pieces, count: int) -> list[_Pieces]:
    """Cut a joined dim into `count` parts by the rule of `torch.chunk`, empty ones last."""
    total = sum(n for _, n in pieces)
    share = -(-total // count)
    return [_slice(pieces, i * share, min((i + 1) * share, total)) for i in range(count)]


def _slice(pieces: _Pieces, begin: int, end: int) -> _Pieces:
    found, position = [], 0
    for start, length in pieces:
        low, high = max(begin - position, 0), min(end - position, length)
        if low < high:
            found.append((start + low, high - low))
        position += length
    return found


def _boxes(pieces: list[_Pieces], strides: tuple[int, ...]) -> tuple[Box, ...]:
    """One box for every combination of the dims' pieces."""
    located = []
    for dim in pieces:
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
