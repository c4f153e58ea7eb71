"""The rows of the consistency table by torch alone: DDP, `fully_shard` and `parallelize_module`.

As a user writes it after torch's tutorials: every rank takes its own rows, the loss is the mean
over ranks, gradients of microbatches are kept by `set_requires_gradient_sync(False)` or `no_sync`,
tied weights are tied again after they were laid out. Four gloo processes, all seeded alike.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from consistency_models import Model
from consistency_runs import (
    FEATURES,
    LAYOUTS,
    SEED,
    STEPS,
    Compared,
    Feature,
    Trained,
    Watched,
    backward,
    batches,
    initialised,
    judged,
    one_device,
    optimizer_of,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from vescale_comm.testing import Failed, WorkerError, outcomes

# What torch has no counterpart of among these three: sharded states alone, and captured units.
COLUMNS = tuple(name for name in LAYOUTS if name not in ("zero1", "static"))


def whole(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def values(model: nn.Module) -> dict[str, Tensor]:
    prefix = "module." if isinstance(model, DistributedDataParallel) else ""
    return {name.removeprefix(prefix): whole(one) for name, one in model.named_parameters()}


def tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    """Megatron's layout: columns, then rows, of attention and feed-forward; the vocabulary too."""
    whole_ = Replicate()
    if model.kind != "ViT":
        parallelize_module(model, mesh, {"embed": RowwiseParallel(input_layouts=whole_)})
    columns = ("attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate")
    for block in model.blocks:
        plan: dict[str, Any] = {
            "attention": PrepareModuleInput(
                input_layouts=(whole_, None), desired_input_layouts=(whole_, None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(whole_,), desired_input_layouts=(whole_,)),
            **{name: ColwiseParallel() for name in columns if _has(block, name)},
            **{name: RowwiseParallel() for name in ("attention.out", "mlp.down")},
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=whole_)})
    if model.options.tied:
        tie(model)


def _has(block: nn.Module, name: str) -> bool:
    return isinstance(dict(block.named_modules()).get(name), nn.Linear)


def tie(model: Model) -> None:
    if model.kind == "ViT":
        first, second = (block.get_submodule("mlp.up") for block in model.blocks)
        second.weight = first.weight
    else:
        model.head.weight = model.embed.weight  # type: ignore[union-attr, assignment]


def distributed(kind: str, feature: Feature, column: str) -> tuple[nn.Module, DeviceMesh]:
    sizes = LAYOUTS[column].sizes
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    built = initialised(kind, feature)
    model: nn.Module = built
    if "tp" in sizes:
        tensor_parallel(built, mesh["tp"])
    if column == "dp4":
        model = DistributedDataParallel(built, find_unused_parameters=feature.options.spare)
    elif "dp" in sizes:
        over = mesh if "replica" in sizes else mesh["dp"]
        again = LAYOUTS[column].zero == 3
        for block in built.blocks:
            fully_shard(block, mesh=over, reshard_after_forward=again)
        fully_shard(built, mesh=over, reshard_after_forward=again)
    if feature.initialised:
        torch.manual_seed(SEED + 10)
        built.initialise()
    return model, mesh


def unsynced(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Around a backward whose gradients are reduced only with the last."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def batch_ranks(mesh: DeviceMesh) -> tuple[int, int]:
    """Into how many parts rows are divided, and which is this rank's."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
    ranks = sizes.get("replica", 1) * sizes.get("dp", 1)
    return ranks, dist.get_rank() // sizes.get("tp", 1)


def train(kind: str, feature: Feature, column: str) -> Trained:
    model, mesh = distributed(kind, feature, column)
    ranks, at = batch_ranks(mesh)
    first, optimizer = values(model), optimizer_of(model)
    for group in optimizer.param_groups:
        group["foreach"] = False  # parameters are on several meshes
    torch.manual_seed(SEED + 1)
    losses: list[float] = []
    masks: list[list[Tensor]] = []
    for step in range(STEPS):
        watch = Watched(model, gather=Tensor.clone)
        watching = watch if step in (0, STEPS - 1) else nullcontext()
        optimizer.zero_grad()
        words = {"skip": step % 3 == 1} if feature.options.spare else {}
        total, parts = 0.0, list(batches(kind, feature, step))
        for number, part in enumerate(parts):
            own = [one.tensor_split(ranks)[at] for one in part]
            with watching, unsynced(model, number == len(parts) - 1):
                total += backward(model(*own, **words), len(parts))
        mean = torch.tensor(total)
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if step in (0, STEPS - 1):
            masks.append([gathered(one, mesh) for one in watch.masks])
        clip(model)
        optimizer.step()
    return Trained(first, masks, losses, values(model), torch.get_rng_state())


def clip(model: nn.Module) -> None:
    """As `clip_grad_norm_`, which takes no gradients on several meshes."""
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    norms = torch.stack([whole(torch.linalg.vector_norm(one)) for one in grads])
    factor = (1.0 / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
    for one in grads:
        one.mul_(factor.item())


def gathered(mask: Tensor, mesh: DeviceMesh) -> Tensor:
    """The mask of the whole batch, of all heads: heads are sharded over tp, rows over the rest."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mask)
    tp = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)).get("tp", 1)
    rows = [every[at : at + tp] for at in range(0, len(every), tp)]
    # Weights of attention have four dims; on the residual all ranks of tp have the same.
    return torch.cat([torch.cat(one, 1) if mask.ndim == 4 else one[0] for one in rows])


def cell(rank: int, world_size: int, kind: str, name: str, column: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"):
        found = train(kind, FEATURES[name], column)
        return asdict(judged(found, one_device(kind, name)))


def compare(kind: str, name: str, column: str) -> Compared | str:
    """A cell of the table by torch alone, or the error that it ends with."""
    if column not in COLUMNS:
        return ""
    try:
        first = outcomes(cell, math.prod(LAYOUTS[column].sizes.values()), kind, name, column)[0]
    except WorkerError as error:  # a rank raised, and the others wait for it
        return f"WorkerError: {error}"
    if isinstance(first, Failed):
        return f"{first.type_name.rpartition('.')[2]}: {first.message}"
    return Compared(**first.value)
