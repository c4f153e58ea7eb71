"""Calibrates, measures a step and predicts it, on every rank of the benchmark `cost`."""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from vescale_parallel.cost import Cost, Precision

from tools.bench._train.by_hand import ByHand
from tools.bench._train.calibrate import cluster_of
from tools.bench._train.memory import peak_of, storages_now
from tools.bench._train.model import Sizes, batch_of, seeded
from tools.bench._train.ours import PLAN
from tools.bench._wire import Wire

FLOAT32 = Precision(compute=4)


@dataclass(frozen=True)
class Measured:
    """One step of one rank, as it was and as the model has it."""

    seconds: float
    sent: int
    peak: int
    cost: Cost


def predicted(sizes: Sizes, mesh: DeviceMesh) -> Cost:
    """The model's answer for this run, from links and rates that are measured on it."""
    tokens = sizes.tokens // mesh["dp"].size()
    cluster = cluster_of(mesh, tokens, sizes.hidden, sizes.inner)
    axes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
    with torch.device("meta"):
        model: nn.Module = seeded(sizes)
    report = PLAN.check(model, axes)
    return report.cost(
        sizes.tokens, sequence=sizes.length, zero=0, cluster=cluster, precision=FLOAT32
    )


def measure_step(
    rank: int, world_size: int, axes: dict[str, int], sizes: Sizes, rounds: int
) -> Measured:
    """The step by hand, whose work is what the model counts, and the prediction of it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of fused optimizers, about CPUs
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    others = storages_now()
    training, batch = ByHand(sizes, mesh), batch_of(sizes, 0)
    for _ in range(3):
        training.step(*batch)
    with Wire() as wire:
        training.step(*batch)
    peak = peak_of(training, batch, others)
    cost = predicted(sizes, mesh)
    found = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        training.step(*batch)
        dist.barrier()
        found.append(time.perf_counter() - start)
    return Measured(statistics.median(found), wire.bytes, peak.total, cost)
