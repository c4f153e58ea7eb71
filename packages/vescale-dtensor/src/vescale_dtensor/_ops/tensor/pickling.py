"""Pickles of DTensors, and so `torch.save`: of the global values, or of each rank's local ones.

Which of the two is meant has to be said, by a block: a pickle cannot hold a mesh, the global values
take a collective for each tensor, and a file of local values is one of as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.conversion import from_agreed_local
from vescale_dtensor._errors import MeshError, UnsupportedError
from vescale_dtensor._layout.mesh import axis_names, current_mesh, describe, own_coordinate
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import (
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
)
from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.call_site import integration

Part = Literal["whole", "local"]

_part: ContextVar[Part | None] = ContextVar("part of a DTensor that a pickle holds", default=None)
_mesh: ContextVar[DeviceMesh | None] = ContextVar("mesh of unpickled DTensors", default=None)


@contextmanager
def pickled(part: Part) -> Iterator[None]:
    """Say what pickles of DTensors hold, `torch.save` included, until the block ends.

    Args:
        part: `"whole"`: the global tensor, which is read as a plain one, by any program. Collective
            for each tensor: every rank pickles the same objects, whatever it does with the bytes.
            `"local"`: this rank's local tensor, to be read on the same rank of a mesh of the same
            shape, in `unpickled_on(mesh)`.

    Raises:
        ValueError: another part.

    Examples:
        with pickled("whole"):
            torch.save(model.state_dict(), path if rank == 0 else io.BytesIO())
    """
    if part not in get_args(Part):
        raise ValueError(f"pickled({part!r}): a pickle holds 'whole' or 'local' tensors")
    token = _part.set(part)
    try:
        yield
    finally:
        _part.reset(token)


@contextmanager
def unpickled_on(mesh: DeviceMesh) -> Iterator[None]:
    """Put DTensors that were pickled in `pickled("local")` on a mesh, until the block ends.

    In the block, `torch.load` takes these pickles with `weights_only=True`, its default, too.

    Args:
        mesh: a mesh of the shape and with the names of axes of the one that they lay on.
    """
    token = _mesh.set(mesh)
    try:
        with torch.serialization.safe_globals([_rebuilt, *_PLACEMENTS]):
            yield
    finally:
        _mesh.reset(token)


_PLACEMENTS: list[Any] = [InterleavedShard, Partial, RaggedShard, Replicate, Shard, StridedShard]


def _reduce_ex(self: DTensor, protocol: Any = None) -> Any:
    """`Tensor.__reduce_ex__`, as the block says that is open."""
    part = _part.get()
    if part is None:
        raise UnsupportedError(
            f"pickling {self!r} (torch.save, multiprocessing): say which part of it, "
            'with vescale_dtensor.state_dict: `with pickled("whole"):` on every rank, or `with '
            'pickled("local"):` for a file of each rank. `torch.save(full_state_dict(model), path)`'
            " saves a model as one device does; vescale_ckpt.save and save and load of "
            "torch.distributed.checkpoint write shards, and take DTensors as they are."
            f"{integration()}"
        )
    detached: Any = self.detach()
    if part == "whole":
        whole = detached.full_tensor()
        if isinstance(self, torch.nn.Parameter):
            whole = torch.nn.Parameter(whole, requires_grad=self.requires_grad)
        return whole.requires_grad_(self.requires_grad).__reduce_ex__(protocol)
    mesh = self.device_mesh
    where = (tuple(mesh.shape), axis_names(mesh), own_coordinate(mesh))
    kind = (isinstance(self, torch.nn.Parameter), self.requires_grad)
    local = detached._local_tensor.detach()
    # A shard may be a view of a storage that holds more than it.
    local = local.clone() if local.untyped_storage().nbytes() > local.nbytes else local
    shape, strides = tuple(self.shape), tuple(self.stride())
    return _rebuilt, (local, tuple(self.placements), shape, strides, where, kind)


def _rebuilt(
    local: Tensor,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    where: tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]],
    kind: tuple[bool, bool],
) -> DTensor:
    """A DTensor from what `pickled("local")` stores.

    Raises:
        MeshError: no mesh is open, or one on which this would be another part of the tensor.
    """
    mesh = _mesh.get()
    if mesh is None:
        mesh = current_mesh("unpickling a DTensor (unpickled_on(mesh) names one)")
    here = (tuple(mesh.shape), axis_names(mesh), own_coordinate(mesh))
    if here != where:
        sizes, names, coordinate = where
        lay = ", ".join(f"{n}={size}" for n, size in zip(names, sizes, strict=True))
        raise MeshError(
            f"unpickling on {describe(mesh)} at {here[2]} what lay on mesh({lay}) at {coordinate}: "
            "a pickle of local tensors is for the same rank of the same mesh. Save it in "
            'pickled("whole"), or with vescale_ckpt, to read it on another'
        )
    made: Any = from_agreed_local(local, mesh, placements, shape=shape, stride=strides)
    is_parameter, requires_grad = kind
    if is_parameter:
        made = torch.nn.Parameter(made, requires_grad=requires_grad)
    found: DTensor = made.requires_grad_(requires_grad)
    return found


HANDLERS: dict[Any, Callable[..., Any]] = {
    **entries("__reduce_ex__ __reduce__", _reduce_ex, (torch.Tensor,)),
}
"""Functions this module answers for."""
