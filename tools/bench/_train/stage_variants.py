"""The variants of a model in stages: ours, and torch's pipelining with the model cut by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.optim import Optimizer
from vescale_parallel import Plan, forward_backward, parallelize

from tools.bench._train.model import Llama, Sizes, seeded
from tools.bench._train.training import adamw

MICROBATCHES = 8

_OF_TORCH: dict[str, tuple[Any, int]] = {
    "gpipe": (schedules.ScheduleGPipe, 1),
    "1f1b": (schedules.Schedule1F1B, 1),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2),
    "zbv": (schedules.ScheduleZBVZeroBubble, 2),
    "dualpipev": (schedules.ScheduleDualPipeV, 2),
}
"""torch's schedules, and how many stages a rank has in them."""


class StagedVariant:
    """Ours: the model as it is, under a plan; with `static` its blocks are captured."""

    def __init__(
        self, sizes: Sizes, mesh: DeviceMesh, *, schedule: str, static: bool = False
    ) -> None:
        plan = Plan(pipeline=schedule, microbatches=MICROBATCHES)
        self.model = parallelize(seeded(sizes), mesh, plan, static=static, check=None)
        self.optimizer: Optimizer = adamw(self.model.parameters())

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As users write it."""
        self.optimizer.zero_grad()
        loss = forward_backward(self.model, tokens, targets)
        self.optimizer.step()
        return loss

    def value(self, loss: Tensor) -> float:
        """Every rank has the loss of the batch."""
        return loss.item()


class StagedByTorch:
    """torch's pipelining: each rank builds the parts of the model that its stages need."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh, *, schedule: str) -> None:
        kind, chunks = _OF_TORCH[schedule]
        group = mesh["pp"].get_group()
        rank, ranks = group.rank(), group.size()
        count = ranks * chunks
        folded = schedule in ("zbv", "dualpipev")
        own = [rank, *([2 * ranks - 1 - rank] if folded else [rank + ranks] * (chunks - 1))]
        device = torch.device("cpu")
        model = seeded(sizes)
        self.parts = [_Part(model, at, count) for at in own]
        stages = [
            PipelineStage(part, at, count, device, group=group)
            for part, at in zip(self.parts, own, strict=True)
        ]
        self.schedule = kind(stages[0] if chunks == 1 else stages, MICROBATCHES, loss_fn=_loss)
        self.is_first, self.is_last = 0 in own, count - 1 in own
        self.last = 0 if folded else ranks - 1
        self.mesh = mesh
        self.optimizer: Optimizer = adamw(p for part in self.parts for p in part.parameters())

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As users write it; the loss is on the ranks of the last stage only."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (tokens,) if self.is_first else ()
        words: dict[str, Any] = {"target": targets, "losses": losses} if self.is_last else {}
        self.schedule.step(*given, return_outputs=False, **words)  # or it would keep all logits
        self.optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    def value(self, loss: Tensor) -> float:
        """That of the last stage."""
        group = self.mesh["pp"].get_group()
        total = loss.clone()
        dist.broadcast(total, dist.get_global_rank(group, self.last), group=group)
        return total.item()


class _Part(nn.Module):
    """Blocks of a stage; on the first one the table before them, on the last one the head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Llama, stage: int, stages: int) -> None:
        super().__init__()
        share = len(model.blocks) // stages
        self.embed = model.embed if stage == 0 else None
        self.blocks = nn.ModuleList(model.blocks[stage * share : (stage + 1) * share])
        self.norm = model.norm if stage + 1 == stages else None
        self.head = model.head if stage + 1 == stages else None
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
