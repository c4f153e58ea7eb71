"""Ordered and compressed gradient reductions for torch's own `fully_shard`.

    from vescale_comm import fsdp2

    fsdp2.install(model, order="rank")

Nothing else changes: the same sharded parameters, the same overlap, the same optimizer.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from vescale_comm._collectives.in_place import reduce_scatter_tensor
from vescale_comm._collectives.replicated_shards import ReplicaGrid
from vescale_comm._engine.operators import FinishedHandle
from vescale_comm._errors import CommArgumentError
from vescale_comm._torch.compat import data_parallel_meshes
from vescale_comm._wire.fold import Order, check_order
from vescale_comm._wire.formats import WIRES, Wire

__all__ = ["ReduceScatter", "install"]


class ReduceScatter:
    """What `fully_shard` calls to reduce gradients: `FSDPModule.set_custom_reduce_scatter`.

    For parameters that are not replicated on another axis; `install` chooses what fits.

    Args:
        order: as for `vescale_comm.reduce_scatter`.
        wire: as for `vescale_comm.reduce_scatter`.

    Raises:
        CommArgumentError: no such order or format.
    """

    def __init__(self, *, order: Order = "rank", wire: Wire | None = None) -> None:
        check_order(order)
        if wire is not None and wire not in WIRES:
            known = ", ".join(map(repr, WIRES))
            raise CommArgumentError(f"fsdp2: unknown wire format {wire!r}; there are {known}")
        self._order, self._wire = order, wire

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent or received."""
        # Not zeroed: torch fills the one that is sent, and every element of the other is written.
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce `input_tensor` over the group; this rank's shard goes to `output_tensor`."""
        # torch calls this from backward hooks, where grad mode is whatever the user's backward has.
        with torch.no_grad():
            return reduce_scatter_tensor(
                output_tensor,
                input_tensor,
                group,
                op=_name(op),
                order=self._order,
                wire=self._wire,
                async_op=async_op,
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(order={self._order!r}, wire={self._wire!r})"


class _ReplicatedReduceScatter(ReduceScatter):
    """The same where shards are replicated (HSDP): see `replicated_shards`."""

    def __init__(self, grid: ReplicaGrid, *, order: Order, wire: Wire | None) -> None:
        super().__init__(order=order, wire=wire)
        self._grid = grid

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Leave in `output_tensor` what the all-reduce over the copies completes."""
        # The division has to come after the sum over the copies, which torch does later.
        if _name(op) != "sum":
            raise CommArgumentError(
                "fsdp2: an average per shard cannot be completed over the copies; leave "
                "set_force_sum_reduction_for_comms as install has set it"
            )
        with torch.no_grad():
            self._grid.reduce(output_tensor, input_tensor, self._order, self._wire)
        # It has happened already; torch only wants something to wait for.
        return FinishedHandle(output_tensor) if async_op else output_tensor


def install(module: nn.Module, *, order: Order = "rank", wire: Wire | None = None) -> nn.Module:
    """Make `fully_shard` reduce the gradients of a module in a stated order or a wire format.

    Call it after `fully_shard`, on the same root, on every rank. With `order="rank"` gradients have
    the bits of one process that runs the ranks' microbatches one after the other, adds their
    gradients, and divides once by the number of ranks: on every backend, with every bucketing. With
    `order="tree"`, and microbatches that are powers of two in number and are on the ranks one
    after the other, they have the same bits on 1, 2, 4 … ranks.

    - A mesh of one axis, alone or beside axes of tensor parallelism: one reduce-scatter.
    - HSDP, a mesh of copies and shards: the same fold over all ranks, in the mesh's order. Sums are
      asked of torch (`set_force_sum_reduction_for_comms`), which divides once, after them, in
      `reduce_dtype`. What it costs is a reduce-scatter over all ranks where HSDP has one over the
      ranks of a copy; the all-reduce between the copies is the same.

    Args:
        module: what `fully_shard` was called on, or contains what it was called on.
        order: as for `vescale_comm.reduce_scatter`.
        wire: as for `vescale_comm.reduce_scatter`. Parameters are gathered as they are.

    Returns:
        `module`.

    Raises:
        CommArgumentError: nothing in it was given to `fully_shard`; no such order or format; or
            copies of one shard only, or one module with parameters on several meshes, where torch
            asks nobody.
    """
    plain = ReduceScatter(order=order, wire=wire)
    found = [each for each in module.modules() if isinstance(each, FSDPModule)]
    if not found:
        raise CommArgumentError(
            f"fsdp2.install: no module in {type(module).__name__} was given to fully_shard; call "
            "fully_shard first"
        )
    # All are looked at before any is changed.
    grids = [_grid(each) for each in found]
    for each, grid in zip(found, grids, strict=True):
        if grid is None:
            each.set_custom_reduce_scatter(cast(Any, plain))
        else:
            each.set_custom_reduce_scatter(
                cast(Any, _ReplicatedReduceScatter(grid, order=order, wire=wire))
            )
            each.set_force_sum_reduction_for_comms(True)
    return module


def _grid(module: FSDPModule) -> ReplicaGrid | None:
    """Return how the shards of a module are replicated; None if they are not."""
    meshes = data_parallel_meshes(module)
    name = type(module).__name__
    if len(meshes) > 1:
        raise CommArgumentError(
            f"fsdp2.install: {name} has parameters on {len(meshes)} meshes, and torch takes one "
            "reduction for all of them: give fully_shard the parts one by one"
        )
    if not meshes:  # it has no parameters of its own
        return None
    mesh, shard, replicate = meshes[0]
    if replicate is None or mesh.size(replicate) == 1:
        return None
    if mesh.size(shard) == 1:
        raise CommArgumentError(
            f"fsdp2.install: {name} is on {mesh}, where every shard is the whole: torch then "
            "reduces over the copies alone, in the backend's own order. Use a mesh of one axis"
        )
    return ReplicaGrid.of(mesh, shard, replicate)


def _name(op: Any) -> str:
    # Compared by ==: torch passes a RedOpType or a ReduceOp, which have different types.
    for name, known in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG)):
        if op == known:
            return name
    raise CommArgumentError(
        f"fsdp2: fully_shard asks for {op}, and there are sum and avg: leave "
        "set_gradient_divide_factor alone, or call set_force_sum_reduction_for_comms(True)"
    )
