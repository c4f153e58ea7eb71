"""The local step of a sharded sequence written by hand, in two ways: heads for rows, keys gathered.

Weights are whole on every rank, and each holds its part of every sequence. Attention is all that
needs the others: DeepSpeed-Ulysses' all-to-alls (arXiv 2309.14509), or all keys and values.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tools.bench._train.by_hand import Local, Weights, own_shards, views
from tools.bench._train.model import Sizes, seeded, turned
from tools.bench._train.training import adamw

Way = Literal["exchange", "gather"]

_HEADS, _ROWS = 1, 2


class ExchangeShards(torch.autograd.Function):
    """Shards of one dim for shards of another: one all-to-all forward, and one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, cut: int, joined: int) -> Tensor:
        ctx.group, ctx.dims = group, (cut, joined)
        return _exchange(x, group, cut, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cut, joined = ctx.dims
        return _exchange(gradients[0], ctx.group, joined, cut), None, None, None


def _exchange(x: Tensor, group: dist.ProcessGroup, cut: int, joined: int) -> Tensor:
    sent = torch.stack(x.chunk(group.size(), cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), joined)


class GatherRows(torch.autograd.Function):
    """All ranks' rows; gradients are summed into each rank's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        found = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(found, x.contiguous(), group=group)
        return torch.cat(found.chunk(group.size()), _ROWS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sent = torch.cat(gradients[0].chunk(ctx.group.size(), _ROWS))
        own = sent.new_empty(len(sent) // ctx.group.size(), *sent.shape[1:])
        dist.reduce_scatter_tensor(own, sent, group=ctx.group)
        return own, None


class LocalRows(Local):
    """The forward pass of one rank's rows of all sequences."""

    def __init__(self, sizes: Sizes, cp: dist.ProcessGroup, way: Way) -> None:
        super().__init__(sizes, None)
        self.cp, self.way = cp, way
        rows = sizes.length // cp.size()
        self.first, self.end = cp.rank() * rows, (cp.rank() + 1) * rows
        self.cos, self.sin = self.cos[self.first : self.end], self.sin[self.first : self.end]
        later = torch.ones(rows, self.end, dtype=torch.bool)
        self.seen = later.tril(self.first)

    def attention(self, w: Weights, at: str, x: Tensor) -> Tensor:
        """All heads of this rank's rows."""
        q, k, v = (self.heads(F.linear(x, w[f"{at}{name}.weight"])) for name in "qkv")
        q, k = turned(q, self.cos, self.sin), turned(k, self.cos, self.sin)
        mixed = self._exchanged(q, k, v) if self.way == "exchange" else self._gathered(q, k, v)
        return F.linear(mixed.transpose(1, 2).flatten(2), w[f"{at}out.weight"])

    def _exchanged(self, *parts: Tensor) -> Tensor:
        q, k, v = (ExchangeShards.apply(one, self.cp, _HEADS, _ROWS) for one in parts)  # type: ignore[no-untyped-call]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = ExchangeShards.apply(mixed, self.cp, _ROWS, _HEADS)  # type: ignore[no-untyped-call]
        return result

    def _gathered(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Keys behind the last row are seen by none.
        k, v = (GatherRows.apply(one, self.cp)[:, :, : self.end] for one in (k, v))  # type: ignore[no-untyped-call]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen)


class ByHandContext:
    """Training of whole weights on parts of sequences."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh, *, way: Way) -> None:
        self.cp = mesh["cp"].get_group()
        self.local = LocalRows(sizes, self.cp, way)
        shards = own_shards(seeded(sizes), None)
        self.flat = nn.Parameter(torch.cat([one.flatten() for one in shards.values()]))
        self.weights = views(self.flat.detach(), shards)
        self.optimizer: Optimizer = adamw([self.flat])

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Gradients go into one flat tensor, as terms of the mean over cp."""
        self.optimizer.zero_grad()
        rows = slice(self.local.first, self.local.end)
        loss = self.local.loss(self.weights, tokens[:, rows], targets[:, rows])
        terms = torch.autograd.grad(loss / self.cp.size(), list(self.weights.values()))
        self.flat.grad = torch.cat([one.flatten() for one in terms])
        dist.all_reduce(self.flat.grad, group=self.cp)
        self.optimizer.step()
        return loss.detach()

    def value(self, loss: Tensor) -> float:
        """The mean over cp."""
        total = loss.clone()
        dist.all_reduce(total, group=self.cp)
        return total.item() / self.cp.size()
