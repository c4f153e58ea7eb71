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
from torch.distributed.tensor import DTensor

from vescale_comm._errors import CommArgumentError
from vescale_comm._fold import Order, check_order
from vescale_comm._formats import WIRES, Wire
from vescale_comm._inplace import reduce_scatter_into

__all__ = ["ReduceScatter", "install"]


class ReduceScatter:
    """What `fully_shard` calls to reduce gradients: `FSDPModule.set_custom_reduce_scatter`.

    Args:
        order: as for `vescale_comm.reduce_scatter`.
        wire: as for `vescale_comm.reduce_scatter`.
    """

    def __init__(self, *, order: Order = "rank", wire: Wire | None = None) -> None:
        check_order(order)
        if wire is not None and wire not in WIRES:
            known = ", ".join(map(repr, WIRES))
            raise CommArgumentError(f"fsdp2: unknown wire format {wire!r}; there are {known}")
        self._order, self._wire = order, wire

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduces `input_tensor` over the group; this rank's piece goes to `output_tensor`."""
        with torch.no_grad():
            return reduce_scatter_into(
                output_tensor,
                input_tensor,
                group,
                op=_name(op),
                order=self._order,
                wire=self._wire,
                async_op=async_op,
            )

    def __repr__(self) -> str:
        return f"ReduceScatter(order={self._order!r}, wire={self._wire!r})"


def install(module: nn.Module, *, order: Order = "rank", wire: Wire | None = None) -> nn.Module:
    """Makes `fully_shard` reduce the gradients of a module in a stated order or a wire format.

    Call it after `fully_shard`, on the same root. With `order="rank"` gradients have the bits of
    one process that runs the ranks' microbatches one after the other, adds their gradients, and
    divides once by the number of ranks: on every backend, with every bucketing. With
    `order="tree"`, and microbatches that are powers of two in number and lie on the ranks one
    after the other, they have the same bits on 1, 2, 4 … ranks.

    Args:
        module: what `fully_shard` was called on, or contains what it was called on.
        order: as for `vescale_comm.reduce_scatter`.
        wire: as for `vescale_comm.reduce_scatter`. Parameters are gathered as they are.

    Returns:
        `module`.

    Raises:
        CommArgumentError: nothing in it was given to `fully_shard`; no such order or format; or
            parameters that are replicated on a mesh axis (HSDP), whose gradients torch reduces
            once more between the replicas, in the backend's own order.
    """
    comm = ReduceScatter(order=order, wire=wire)
    found = [each for each in module.modules() if isinstance(each, FSDPModule)]
    if not found:
        raise CommArgumentError(
            f"fsdp2.install: no module in {type(module).__name__} was given to fully_shard; call "
            "fully_shard first"
        )
    if order != "native":
        _check_not_replicated(module)
    for each in found:
        each.set_custom_reduce_scatter(cast(Any, comm))
    return module


def _check_not_replicated(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        if any(placement.is_replicate() for placement in placements):
            raise CommArgumentError(
                f"fsdp2.install: {name} is {placements} on {cast(Any, parameter).device_mesh}: the "
                "all-reduce between replicas is torch's own and keeps the backend's order; use a "
                "mesh of one axis"
            )


def _name(op: Any) -> str:
    for name, known in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG)):
        if op == known:
            return name
    raise CommArgumentError(
        f"fsdp2: fully_shard asks for {op}, and there are sum and avg: leave "
        "set_gradient_divide_factor alone, or call set_force_sum_reduction_for_comms(True)"
    )
