"""The local step written by hand: plain tensors, plain autograd, `torch.distributed` calls.

What somebody writes who knows exactly what one rank has to do. Megatron's tensor parallelism: one
all-reduce forward and one backward for each attention and each feed-forward layer. Data
parallelism: all parameters of the rank in one flat tensor, so their gradients cross the wire in one
all-reduce, and the optimizer updates one tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tools.bench._train.model import Sizes, rotary_table, seeded, turned
from tools.bench._train.training import adamw, mean_over, own_rows

Weights = dict[str, Tensor]

_COLUMNS = ("q.weight", "k.weight", "v.weight", "gate.weight", "up.weight")
_ROWS = ("out.weight", "down.weight")


class SpreadRegion(torch.autograd.Function):
    """Into a region that is split over tp: gradients are summed on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumRegion(torch.autograd.Function):
    """Out of such a region: terms are summed on the way forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Local:
    """The forward pass of one rank, as functions of its weights."""

    def __init__(self, sizes: Sizes, tp: dist.ProcessGroup | None) -> None:
        self.sizes, self.tp = sizes, tp
        self.cos, self.sin = rotary_table(sizes)

    def loss(self, w: Weights, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean over this rank's rows."""
        x = F.embedding(tokens, w["embed.weight"])
        for index in range(self.sizes.layers):
            x = self.block(w, f"blocks.{index}.", x)
        logits = F.linear(self.norm(x, w["norm.weight"]), w["head.weight"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def block(self, w: Weights, at: str, x: Tensor) -> Tensor:
        """Attention and feed-forward layer, each with a residual connection."""
        x = x + self.attention(w, f"{at}attention.", self.norm(x, w[f"{at}attention_norm.weight"]))
        return x + self.mlp(w, f"{at}mlp.", self.norm(x, w[f"{at}mlp_norm.weight"]))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.sizes.hidden,), weight)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.sizes.head).transpose(1, 2)

    def attention(self, w: Weights, at: str, x: Tensor) -> Tensor:
        """The heads of this rank, summed over tp."""
        x = self.into(x)
        q, k, v = (self.heads(F.linear(x, w[f"{at}{name}.weight"])) for name in "qkv")
        q, k = turned(q, self.cos, self.sin), turned(k, self.cos, self.sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_of(F.linear(mixed.transpose(1, 2).flatten(2), w[f"{at}out.weight"]))

    def mlp(self, w: Weights, at: str, x: Tensor) -> Tensor:
        """The inner channels of this rank, summed over tp."""
        x = self.into(x)
        wide = F.silu(F.linear(x, w[f"{at}gate.weight"])) * F.linear(x, w[f"{at}up.weight"])
        return self.out_of(F.linear(wide, w[f"{at}down.weight"]))

    def into(self, x: Tensor) -> Tensor:
        result: Tensor = x if self.tp is None else SpreadRegion.apply(x, self.tp)  # type: ignore[no-untyped-call]
        return result

    def out_of(self, x: Tensor) -> Tensor:
        result: Tensor = x if self.tp is None else SumRegion.apply(x, self.tp)  # type: ignore[no-untyped-call]
        return result


class ByHand:
    """Data and tensor parallel training of the local part."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh) -> None:
        self.mesh, self.dp = mesh, mesh["dp"].get_group()
        tp = "tp" in (mesh.mesh_dim_names or ())
        self.local = Local(sizes, mesh["tp"].get_group() if tp else None)
        shards = own_shards(seeded(sizes), mesh["tp"] if tp else None)
        self.flat = nn.Parameter(torch.cat([one.flatten() for one in shards.values()]))
        self.weights = views(self.flat.detach(), shards)
        self.optimizer: Optimizer = adamw([self.flat])

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Gradients go into one flat tensor, as terms of the mean over dp."""
        self.optimizer.zero_grad()
        rows = own_rows(tokens, self.mesh), own_rows(targets, self.mesh)
        loss = self.local.loss(self.weights, *rows)
        terms = torch.autograd.grad(loss / self.dp.size(), list(self.weights.values()))
        self.flat.grad = torch.cat([one.flatten() for one in terms])
        dist.all_reduce(self.flat.grad, group=self.dp)
        self.optimizer.step()
        return loss.detach()

    def value(self, loss: Tensor) -> float:
        """The mean over dp."""
        return mean_over(self.mesh, loss)


def own_shards(model: nn.Module, tp: DeviceMesh | None) -> Weights:
    """This rank's part of every parameter, by name."""
    found = {name: one.detach() for name, one in model.named_parameters()}
    if tp is None:
        return found
    dims = {name: 0 if name.endswith(_COLUMNS) else 1 for name in found}
    rank, ranks = tp.get_local_rank(), tp.size()
    return {
        name: one.chunk(ranks, dims[name])[rank] if name.endswith(_COLUMNS + _ROWS) else one
        for name, one in found.items()
    }


def views(flat: Tensor, shapes: Weights) -> Weights:
    """Leaves that share the memory of a flat tensor, one after the other."""
    parts = torch.split(flat, [one.numel() for one in shapes.values()])
    return {
        name: part.view(one.shape).requires_grad_()
        for part, (name, one) in zip(parts, shapes.items(), strict=True)
    }
