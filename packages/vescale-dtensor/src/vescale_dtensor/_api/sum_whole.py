"""`sum_whole`: sums over stored shards have the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._dispatch.registry import on_change
from vescale_dtensor._planning import whole_sums


def sum_whole(mesh: DeviceMesh, axes: Sequence[str]) -> None:
    """Have sums over what `RaggedShard`s of these axes hold taken of whole tensors, from now on.

    A norm, a mean or a product of such a tensor is otherwise a sum of one part for each rank, whose
    last bits follow the number of ranks. Each such operation gathers its operands instead. It holds
    for all tensors on this very mesh; shards that `Shard` states, as of activations,
    are summed as before. Call it on every rank of the mesh.

    Args:
        mesh: where the tensors are.
        axes: of the mesh, by name.

    Raises:
        MeshError: the mesh has no axis of such a name.
    """
    if whole_sums.note(mesh, axes):
        on_change.notify()  # plans that sum shards were made before
