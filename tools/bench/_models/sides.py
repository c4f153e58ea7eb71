"""What trains a model of the zoo: ours in its forms, torch's FSDP2, and one device.

Every step drops gradients, runs forward and backward, clips to a norm of 1, and updates by fused
AdamW. torch's is written as its tutorials do: blocks and root sharded by `fully_shard`, the last
block kept, one gathered ahead. Over a mesh with `tp` it takes `parallelize_module` where what the
model declares are styles of torch's; models that declare others, or nothing, it shards over all
ranks, each with rows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from vescale_dtensor import Joint
from vescale_parallel import Plan, captured_units, graph, parallelize

from tools.bench._models.zoo import Inputs, Sizes, built
from tools.bench._train.by_torch import gather_ahead, groups_by_mesh
from tools.bench._train.training import adamw, mean_over

NORM = 1.0
_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class OneDevice:
    """The reference: the model as it is, on the whole batch."""

    def __init__(self, name: str, sizes: Sizes, mesh: DeviceMesh) -> None:
        self.model = self.placed(built(name, sizes), mesh)
        self.optimizer: Optimizer = adamw(self.parameters())

    def placed(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The model, as this side has it on a mesh."""
        return model

    def parameters(self) -> Any:
        """What the optimizer steps."""
        return self.model.parameters()

    def step(self, inputs: Inputs) -> Tensor:
        """As users write it."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(**self.own(inputs)).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self.clip()
        self.optimizer.step()
        return loss.detach()

    def own(self, inputs: Inputs) -> Inputs:
        """What of a global batch this rank passes to the model."""
        return inputs

    def clip(self) -> None:
        """Scale gradients to a norm."""
        clip_grad_norm_(self.model.parameters(), NORM)

    def value(self, loss: Tensor) -> float:
        """The loss of the global batch."""
        return loss.item()

    def replays(self) -> tuple[int, int]:
        """How many forwards of units were replayed, and how many units there are."""
        return 0, 0

    def said(self) -> list[str]:
        """Why parts of it run otherwise than was asked for, in words."""
        return []


class Ours(OneDevice):
    """The model under a plan of its own, or by the shapes of its layers; default checks."""

    static = False

    def placed(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Parallelised."""
        names = mesh.mesh_dim_names or ()
        zero = 3 if "dp" in names else 0
        plan = Plan.from_hf(model, mesh=mesh) if "tp" in names else Plan()
        rules = plan.parameters or {"*": "replicate"}
        batch = "dp:0" if "dp" in names else None
        plan = plan.with_(parameters=rules, batch=batch, zero=zero)
        return parallelize(model, mesh, plan, static=self.static)


class Static(Ours):
    """The same, captured."""

    static = True

    def replays(self) -> tuple[int, int]:
        """Of the units that hold no others."""
        units = [one for one in captured_units(self.model) if "other units" not in str(one)]
        return sum(one.replays for one in units), len(units)

    def said(self) -> list[str]:
        """What units say of themselves."""
        return [str(one) for one in captured_units(self.model) if one.refusal]


class OnGraph(Ours):
    """The whole step as one scheduled graph, made at the first step."""

    _step: Joint | None = None

    def step(self, inputs: Inputs) -> Tensor:
        """One call."""
        if self._step is None:
            made = graph.train_step(self.model, lambda **given: self.model(**given).loss, **inputs)
            made = made.with_optimizer(self.optimizer, max_norm=NORM)
            found = graph.schedule(made.graph_module, memory_bytes="traced")
            self._step = made.running(found.graph_module)
        loss: Tensor = self._step(**inputs)[0]
        return loss.detach()


class ByTorch(OneDevice):
    """FSDP2, over tensor parallelism where a model declares styles that torch has."""

    def placed(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Sharded."""
        styles = torch_styles(model) if "tp" in (mesh.mesh_dim_names or ()) else {}
        if styles:
            parallelize_module(model, mesh["tp"], styles)
        self.mesh = self._of_rows(mesh, bool(styles))
        if self.mesh is None:
            return model
        for blocks in stacks(model):
            *others, last = blocks
            for block in others:
                fully_shard(block, mesh=self.mesh)
            fully_shard(last, mesh=self.mesh, reshard_after_forward=False)
        fully_shard(model, mesh=self.mesh)
        for blocks in stacks(model):
            gather_ahead(model, blocks)
        return model

    def _of_rows(self, mesh: DeviceMesh, has_styles: bool) -> DeviceMesh | None:
        """The mesh over which parameters are sharded, and each rank has rows of its own."""
        names = mesh.mesh_dim_names or ()
        if has_styles or len(names) == 1:
            own = "dp" in names or not has_styles
            return mesh[names[0]] if own else None
        return DeviceMesh(mesh.device_type, mesh.mesh.flatten(), mesh_dim_names=("rows",))

    def parameters(self) -> Any:
        """Those of one mesh in a group each: a fused optimizer takes no list of several."""
        return groups_by_mesh(self.model)

    def own(self, inputs: Inputs) -> Inputs:
        """This rank's rows."""
        mesh = self.mesh
        if mesh is None:
            return inputs
        at, parts = mesh.get_local_rank(), mesh.size()
        return {name: one.chunk(parts)[at] for name, one in inputs.items()}

    def clip(self) -> None:
        """Of parameters on several meshes: the norm of each mesh's, then of those."""
        norms = []
        for group in self.optimizer.param_groups:
            found: Any = get_total_norm([p.grad for p in group["params"] if p.grad is not None])
            norms.append(found.full_tensor() if hasattr(found, "full_tensor") else found)
        total = torch.linalg.vector_norm(torch.stack(norms))
        for group in self.optimizer.param_groups:
            clip_grads_with_norm_(group["params"], NORM, total)

    def value(self, loss: Tensor) -> float:
        """The mean over the ranks, which have equally many tokens that count."""
        return loss.item() if self.mesh is None else mean_over(self.mesh, loss)


def torch_styles(model: nn.Module) -> dict[str, ParallelStyle]:
    """What the model declares, as styles of torch's; empty where one of them is none."""
    own: Any = model
    blocks = getattr(own.config, "base_model_tp_plan", None) or {}
    declared = {f"{own.base_model_prefix}.{name}": style for name, style in blocks.items()}
    declared |= (getattr(type(own), "_tp_plan", None) or {}) if declared else {}
    gathered = {"colwise_gather_output", "colwise_rep"}
    if not all(style in _STYLES or style in gathered for style in declared.values()):
        return {}
    whole: Any = Replicate()
    return {
        name: ColwiseParallel(output_layouts=whole) if style in gathered else _STYLES[style]()
        for name, style in declared.items()
    }


def stacks(model: nn.Module) -> list[Sequence[Any]]:
    """The repeated blocks of a model, a list for each of its stacks."""
    found: list[nn.ModuleList] = []
    names: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in names)
        if isinstance(module, nn.ModuleList) and not inside and len(module) > 1:
            found.append(module)
            names.append(name)
    return [list(one) for one in found]
