"""The variant of torch alone: `parallelize_module` over tp, then `fully_shard` over dp.

After torch's tensor parallel tutorial and TorchTitan: inputs of attention and feed-forward become
DTensors once, so that their gradients are summed over tp once and not for every projection.
"""

from __future__ import annotations

from itertools import groupby
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
from torch.optim import Optimizer

from tools.bench._train.model import Sizes, seeded
from tools.bench._train.training import adamw, mean_over, own_rows


class ByTorch:
    """FSDP2 over dp, and torch's tensor parallelism over tp where the mesh has it."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.model = _parallelized(seeded(sizes), mesh)
        self.optimizer: Optimizer = adamw(_groups(self.model))

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As users write it: every rank its own rows."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(own_rows(tokens, self.mesh), own_rows(targets, self.mesh))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def value(self, loss: Tensor) -> float:
        """The mean over dp."""
        return mean_over(self.mesh, loss)


def _parallelized(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        if "tp" in (mesh.mesh_dim_names or ()):
            parallelize_module(block, mesh["tp"], _tensor_parallel())
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


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


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """A group of parameters for each mesh: a fused optimizer takes no list of several meshes."""

    def dims(parameter: nn.Parameter) -> int:
        mesh: DeviceMesh | None = getattr(parameter, "device_mesh", None)
        return 0 if mesh is None else mesh.ndim

    ordered = sorted(model.parameters(), key=dims)
    return [{"params": list(some)} for _, some in groupby(ordered, key=dims)]
