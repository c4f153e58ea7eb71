"""The variants of torch alone: `parallelize_module` over tp, then FSDP2 or DDP over dp.

After torch's tensor parallel tutorial and TorchTitan: inputs of attention and feed-forward become
DTensors once, so that their gradients are summed over tp once and not for every projection. FSDP2
keeps the last block, whose backward comes first, and gathers one block ahead in both directions: by
itself it does so on other streams of a device, and gloo has none. What it cannot be asked for here
is to scatter gradients while the backward goes on. DDP's buckets are a quarter of the gradients:
its default of 25 MB would send all of these models' in one, after the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tools.bench._train.model import Sizes, seeded
from tools.bench._train.training import adamw, mean_over, own_rows


class ByTorch:
    """Training as users write it: every rank its own rows.

    `compiled`: each block is, as TorchTitan does it.
    """

    def __init__(self, sizes: Sizes, mesh: DeviceMesh, *, compiled: bool = False) -> None:
        self.mesh, self.compiled = mesh, compiled
        model = seeded(sizes)
        for block in model.get_submodule("blocks").children():
            if "tp" in (mesh.mesh_dim_names or ()):
                parallelize_module(block, mesh["tp"], _tensor_parallel())
            if compiled:
                block.compile()
        self.model = self.over_dp(model)
        self.optimizer: Optimizer = adamw(groups_by_mesh(self.model))

    def over_dp(self, model: nn.Module) -> nn.Module:
        """The model, each rank with a shard of it: FSDP2."""
        *others, last = model.get_submodule("blocks").children()
        for block in others:
            fully_shard(block, mesh=self.mesh["dp"])
        fully_shard(last, mesh=self.mesh["dp"], reshard_after_forward=False)
        fully_shard(model, mesh=self.mesh["dp"])
        gather_ahead(model, [*others, last])
        return model

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(own_rows(tokens, self.mesh), own_rows(targets, self.mesh))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def value(self, loss: Tensor) -> float:
        """The mean over dp."""
        return mean_over(self.mesh, loss)


class ReplicatedByTorch(ByTorch):
    """The same with the whole model, or the whole of its part over tp, on each rank of dp."""

    def over_dp(self, model: nn.Module) -> nn.Module:
        """The model in DDP, which knows plain parameters only: torch's own way to give it those."""
        _pre_dp_module_transform(model)
        megabytes = sum(one.numel() * one.element_size() for one in model.parameters()) / 2**20
        return DistributedDataParallel(
            model,
            process_group=self.mesh["dp"].get_group(),
            bucket_cap_mb=max(1, megabytes / 4),
            gradient_as_bucket_view=True,
            static_graph=True,
        )


def gather_ahead(model: nn.Module, blocks: Sequence[Any]) -> None:
    """Begin to gather a block while the one before it computes, and in backward the one after.

    These hooks run behind FSDP2's own in forward, and ahead of them in backward: there it would
    gather the next block itself, and wait for it.
    """
    model.register_forward_pre_hook(_starts(blocks[0]))
    for before, after in pairwise(blocks):
        before.register_forward_pre_hook(_starts(after))
        after.register_full_backward_pre_hook(_starts(before))


def _starts(block: Any) -> Any:
    def hook(*_: object) -> None:
        block.unshard(async_op=True)

    return hook


def _tensor_parallel() -> dict[str, Any]:
    """How one block lies over tp."""
    whole: Any = Replicate()
    plan: dict[str, Any] = {
        "attention": PrepareModuleInput(
            input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
    }
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    plan |= {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
    return plan


def groups_by_mesh(model: nn.Module) -> list[dict[str, Any]]:
    """A group of parameters for each mesh: a fused optimizer takes no list of several meshes."""

    def dims(parameter: nn.Parameter) -> int:
        mesh: DeviceMesh | None = getattr(parameter, "device_mesh", None)
        return 0 if mesh is None else mesh.ndim

    ordered = sorted(model.parameters(), key=dims)
    return [{"params": list(some)} for _, some in groupby(ordered, key=dims)]
