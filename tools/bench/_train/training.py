"""Defines the interface of every variant of the benchmark, so that all are measured alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from tools.bench._train.model import Sizes, seeded

LEARNING_RATE = 1e-3


class Training(Protocol):
    """A model in training.

    Attributes:
        optimizer: steps all parameters.
    """

    optimizer: Optimizer

    def step(self, tokens: Tensor, targets: Tensor, /) -> Tensor:
        """Gradients dropped, forward, backward, update; returns the loss, perhaps unreduced."""

    def value(self, loss: Tensor) -> float:
        """The loss of the global batch; a collective, which is not part of a step."""


Build = Callable[[Sizes, DeviceMesh], Training]


def adamw(parameters: Iterable[Any]) -> AdamW:
    """The optimizer of every variant: fused, which is each one's fastest on CPUs."""
    return AdamW(parameters, lr=LEARNING_RATE, fused=True)


class OneDevice:
    """The reference: the model as it is, on the whole batch."""

    def __init__(self, sizes: Sizes) -> None:
        self.model = seeded(sizes)
        self.optimizer: Optimizer = adamw(self.model.parameters())

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As users write it."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def value(self, loss: Tensor) -> float:
        """Nothing to sum."""
        return loss.item()


def own_rows(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's sequences of a global batch."""
    return batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]


def mean_over(mesh: DeviceMesh, loss: Tensor) -> float:
    """The mean over the ranks of `dp`, which hold equally many sequences."""
    total = loss.clone()
    dist.all_reduce(total, group=mesh["dp"].get_group())
    return total.item() / mesh["dp"].size()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    with torch.no_grad():
        # Of an alias: parameters whose own local tensors were handed out are gathered one by one.
        alias: Any = tensor.detach()
        held: Tensor = alias.to_local() if hasattr(alias, "to_local") else alias
        return held
