"""Trains one model three times, in turns, on every rank of the benchmark `consistency`.

In turns, so that drift of the machine hits all three alike; each step begins with a seed of its
own, because the three share one process and its generator.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from vescale_parallel import mesh as named_mesh
from vescale_parallel import parallelize
from vescale_parallel.train.data import load_corpus, training_batch
from vescale_parallel.train.digests import full_tensor
from vescale_parallel.train.model import Decoder, ModelConfig
from vescale_parallel.train.plan import PLAN

from tools.bench import in_turn
from tools.bench._stock_plan import own_part, parallelize_by_torch
from tools.bench._wire import Wire

SEED = 0
NAMES = ("one", "stock", "ours")
WARM_UP = 3
"""Steps whose time does not count: plans and optimizer states are made there."""


@dataclass
class Training:
    """One model in training.

    Attributes:
        model: plain, or laid out.
        forward: from the global tokens and targets to a loss.
        value: a loss as one number for the global batch; a collective on a mesh.
        gather: the whole of what a module put out.
        losses, seconds: of each step.
        dropped: of the first step and each dropout, which non-zero elements it made zero.
        wire: collectives of the second step.
    """

    model: nn.Module
    forward: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor], float]
    gather: Callable[[Tensor], Tensor]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    dropped: list[Tensor] = field(default_factory=list)
    wire: Wire = field(default_factory=Wire)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Forward, backward, clip, update."""
        torch.manual_seed(SEED + 1 + len(self.losses))
        self.optimizer.zero_grad()
        loss = self.forward(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(self.value(loss.detach()))

    def watch_dropout(self) -> list[Any]:
        """Note what every dropout drops, until the handles returned are removed."""

        def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            with torch.no_grad():
                self.dropped.append(self.gather((output == 0) & (inputs[0] != 0)))

        dropouts = [m for m in self.model.modules() if isinstance(m, nn.Dropout)]
        return [m.register_forward_hook(note) for m in dropouts]


def _plain(config: ModelConfig) -> Decoder:
    torch.manual_seed(SEED)
    return Decoder(config)


def _on_one_device(config: ModelConfig) -> Training:
    model = _plain(config)
    return Training(model, model, Tensor.item, lambda piece: piece)


def _by_torch(config: ModelConfig) -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_by_torch(_plain(config), mesh)

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(own_part(tokens, mesh), own_part(targets, mesh))
        return loss

    def value(loss: Tensor) -> float:
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    # Batch over dp; heads of attention weights, or the sequence of the residual, over tp.
    return Training(model, forward, value, lambda piece: _joined(piece, mesh))


def _joined(piece: Tensor, mesh: DeviceMesh) -> Tensor:
    numbers = DTensor.from_local(piece.byte(), mesh, [Shard(0), Shard(1)])
    return numbers.full_tensor().bool()


def _by_us(config: ModelConfig) -> Training:
    model = parallelize(_plain(config), named_mesh(dp=2, tp=2), PLAN)
    return Training(model, model, Tensor.item, full_tensor)


def train(rank: int, world_size: int, steps: int, config: ModelConfig) -> dict[str, Any] | None:
    """Train all three; rank 0 returns what was found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch's DTensor: random ops on CPU, and the like
    corpus = load_corpus([], config.context)
    trainings = {"stock": _by_torch(config), "ours": _by_us(config)}
    if rank == 0:
        trainings["one"] = _on_one_device(config)
    start = {name: _parameters(one.model) for name, one in trainings.items()}
    for step in range(steps):
        batch = training_batch(corpus, batch=8, context=config.context, seed=SEED, step=step)
        for name in in_turn(NAMES, step):
            _timed_step(trainings.get(name), step, *batch)
    refilled = {name: _refilled(one.model) for name, one in trainings.items()}
    if rank:
        return None
    return {
        "losses": {name: one.losses for name, one in trainings.items()},
        "seconds": {name: _steady(one.seconds) for name, one in trainings.items()},
        "collectives": {name: dict(one.wire.counts) for name, one in trainings.items()},
        "bytes": {name: one.wire.bytes for name, one in trainings.items()},
        "start": _alike(start),
        "refilled": _alike(refilled),
        "dropped": _dropped_too({name: one.dropped for name, one in trainings.items()}),
    }


def _steady(seconds: list[float]) -> float:
    return statistics.median(seconds[min(WARM_UP, len(seconds) - 1) :])


def _timed_step(training: Training | None, step: int, tokens: Tensor, targets: Tensor) -> None:
    """A step of those ranks that have this training; the others wait."""
    dist.barrier()
    began = time.perf_counter()
    if training is not None:
        _observed_step(training, step, tokens, targets)
    dist.barrier()
    if training is not None:
        training.seconds.append(time.perf_counter() - began)


def _observed_step(training: Training, step: int, tokens: Tensor, targets: Tensor) -> None:
    handles = training.watch_dropout() if step == 0 else []
    if step == 1:
        with training.wire:
            training.step(tokens, targets)
    else:
        training.step(tokens, targets)
    for handle in handles:
        handle.remove()


def _parameters(model: nn.Module) -> list[Tensor]:
    return [full_tensor(parameter).clone() for parameter in model.parameters()]


def _refilled(model: nn.Module) -> list[Tensor]:
    """The parameters after initialising them where they are, as large models must be."""
    torch.manual_seed(SEED)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return _parameters(model)


def _alike(found: dict[str, list[Tensor]]) -> dict[str, float]:
    """The part of all elements that is bitwise that of one device."""
    total = sum(one.numel() for one in found["one"])
    return {
        name: sum(int((a == b).sum()) for a, b in zip(tensors, found["one"], strict=True)) / total
        for name, tensors in found.items()
    }


def _dropped_too(found: dict[str, list[Tensor]]) -> dict[str, float]:
    """Of the elements that one device drops, the part that is dropped here too."""
    total = sum(int(one.sum()) for one in found["one"])
    return {
        name: sum(int((a & b).sum()) for a, b in zip(masks, found["one"], strict=True)) / total
        for name, masks in found.items()
    }
