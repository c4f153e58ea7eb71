"""ZeRO-3 written by hand: each block's weights in one flat buffer, of which ranks keep a piece.

Gathered one block ahead, freed after use, gathered again in backward, and reduce-scattered behind.
What autograd saves of a weight is its place in the buffer, so that the buffer can go.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tools.bench._train.by_hand import Local, Weights
from tools.bench._train.model import Sizes, seeded
from tools.bench._train.training import adamw, mean_over, own_rows

Place = tuple[torch.Size, tuple[int, ...], int]
"""Size, strides and offset of a view of a unit's buffer."""


class Unit:
    """Some weights in one flat buffer, padded so that every rank keeps as much of it.

    Attributes:
        shard: what this rank keeps, and its optimizer steps.
        whole: the gathered buffer, while it is there.
        before: the unit whose backward comes next.
    """

    def __init__(self, weights: Weights, group: dist.ProcessGroup) -> None:
        self.shapes = {name: one.shape for name, one in weights.items()}
        self.group = group
        flat = torch.cat([one.detach().flatten() for one in weights.values()])
        flat = F.pad(flat, [0, -flat.numel() % group.size()])
        self.padded = flat.numel()
        self.shard = nn.Parameter(flat.chunk(group.size())[group.rank()].clone())
        self.whole: Tensor | None = None
        self.before: Unit | None = None
        self._coming: Any = None
        self._leaving: Any = None

    def start(self) -> None:
        """Begin to gather, if the buffer is not there."""
        if self.whole is None:
            self.whole = torch.empty(self.padded)
            self._coming = dist.all_gather_into_tensor(
                self.whole, self.shard.detach(), group=self.group, async_op=True
            )

    def gathered(self) -> Tensor:
        """The whole buffer."""
        self.start()
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        assert self.whole is not None
        return self.whole

    def release(self) -> None:
        """Free the buffer; views that are in use keep it."""
        self.whole = None

    def weights(self) -> Weights:
        """Views of the gathered buffer; their gradients are reduce-scattered."""
        found = GatherWeights.apply(self.shard, self)  # type: ignore[no-untyped-call]
        return dict(zip(self.shapes, found, strict=True))

    def views(self) -> tuple[Tensor, ...]:
        """The weights, without a history."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = torch.split(self.gathered()[: sum(sizes)], sizes)
        return tuple(p.view(shape) for p, shape in zip(parts, self.shapes.values(), strict=True))

    def reduce(self, gradients: tuple[Tensor, ...]) -> None:
        """Begin to add up gradients; each rank gets its shard's."""
        padding = torch.zeros(self.padded - sum(one.numel() for one in gradients))
        terms = torch.cat([*(one.flatten() for one in gradients), padding])
        self.shard.grad = torch.empty_like(self.shard)
        work = dist.reduce_scatter_tensor(self.shard.grad, terms, group=self.group, async_op=True)
        self._leaving = work, terms

    def wait(self) -> None:
        """Until the gradient is there."""
        self._leaving[0].wait()
        self._leaving = None

    def pack(self, tensor: Tensor) -> Tensor | Place:
        """What autograd keeps of a tensor: of a view of the buffer, its place."""
        whole = self.whole
        if whole is None or tensor.untyped_storage().data_ptr() != whole.data_ptr():
            return tensor
        return tensor.size(), tensor.stride(), int(tensor.storage_offset())

    def unpack(self, saved: Tensor | Place) -> Tensor:
        """The tensor again; the next unit's buffer begins to arrive meanwhile."""
        if isinstance(saved, Tensor):
            return saved
        whole = self.gathered()
        if self.before is not None:
            self.before.start()
        return whole.as_strided(*saved)


class GatherWeights(torch.autograd.Function):
    """From a shard to the weights; back, from their gradients to the shard's."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, unit: Unit) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return unit.views()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # The last node of its unit in backward, as it was the first in forward.
        ctx.unit.release()
        ctx.unit.reduce(gradients)
        return None, None


class ByHandZero3:
    """Data parallel training of the whole model, of which each rank keeps a part."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh) -> None:
        self.mesh, self.sizes, self.local = mesh, sizes, Local(sizes, None)
        group, found = mesh["dp"].get_group(), dict(seeded(sizes).named_parameters())
        blocks = [_those(found, f"blocks.{index}.") for index in range(sizes.layers)]
        inside = {name for block in blocks for name in block}
        self.root = Unit({n: one for n, one in found.items() if n not in inside}, group)
        self.blocks = [Unit(block, group) for block in blocks]
        for unit, later in zip(self.blocks, self.blocks[1:], strict=False):
            later.before = unit
        self.units = [self.root, *self.blocks]
        self.optimizer: Optimizer = adamw([unit.shard for unit in self.units])

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Gradients are terms of the mean over dp."""
        self.optimizer.zero_grad()
        loss = self._loss(own_rows(tokens, self.mesh), own_rows(targets, self.mesh))
        (loss / self.mesh["dp"].size()).backward()  # type: ignore[no-untyped-call]
        for unit in self.units:
            unit.wait()
        self.optimizer.step()
        return loss.detach()

    def value(self, loss: Tensor) -> float:
        """The mean over dp."""
        return mean_over(self.mesh, loss)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.root.start()
        self.blocks[0].start()
        w = self.root.weights()  # kept until its gradients are there
        x = F.embedding(tokens, w["embed.weight"])
        for index in range(self.sizes.layers):
            x = self._block(index, x)
        logits = F.linear(self.local.norm(x, w["norm.weight"]), w["head.weight"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _block(self, index: int, x: Tensor) -> Tensor:
        unit, last = self.blocks[index], index == len(self.blocks) - 1
        with torch.autograd.graph.saved_tensors_hooks(unit.pack, unit.unpack):
            weights = unit.weights()
            if not last:
                self.blocks[index + 1].start()
            x = self.local.block(weights, f"blocks.{index}.", x)
        if not last:  # whose backward comes first
            unit.release()
        return x


def _those(found: dict[str, nn.Parameter], prefix: str) -> Weights:
    return {name: one for name, one in found.items() if name.startswith(prefix)}
