"""Divides the rows of a global batch into shards, as `torch.chunk` does, nested."""

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._common.mesh import mesh_sizes


def row_counts(rows: int, sizes: Sequence[int]) -> list[int]:
    """Return the rows of each shard, in order, over axes of these sizes, outermost first."""
    counts = [rows]
    for size in sizes:
        # Nested, as DTensors shard one dim over two axes: chunks of chunks, which are not the
        # chunks of the product of the sizes.
        counts = [one for whole in counts for one in _chunks(whole, size)]
    return counts


def _chunks(rows: int, size: int) -> list[int]:
    each = -(-rows // size)
    return [max(0, min(each, rows - at * each)) for at in range(size)]


def shard_of(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number of the shard at these coordinates of the axes that share a batch."""
    number = 0
    for at, size in zip(coordinates, sizes, strict=True):
        number = number * size + at
    return number


def sharing_axes(mesh: DeviceMesh, axes: Sequence[str]) -> list[str]:
    """Return those of the axes that the mesh has, in its order: the outermost cuts first."""
    return [axis for axis in mesh_sizes(mesh) if axis in axes]
