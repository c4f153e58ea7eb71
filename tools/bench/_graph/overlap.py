"""Trains one model in turns on every rank, for the communication rows of `graph`.

Data parallel over gloo: eager, captured, torch's DDP, and the joint graph as it is traced and as
it is scheduled. In turns, so that drift of the machine hits all alike. Forward, backward and the
sums of gradients are timed; the optimizer is the same for all and is left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from vescale_dtensor import capture, gradient_total, joint
from vescale_parallel import Plan, graph, memory, mesh, parallelize

from tools.bench import in_turn

LAYERS, WIDTH, ROWS = 6, 512, 128  # rows of a rank
CAP_BYTES = 2 << 20
"""Of a bucket, ours and DDP's: its default of 25 MB would send this model's gradients in one."""
_WARM_UP = 3


def network() -> nn.Module:
    """A plain stack of layers, the same on every rank."""
    torch.manual_seed(0)
    parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*parts)


def trained(rank: int, world_size: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each, and what the plans say."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _trained(rank, world_size, rounds)
    finally:
        torch.set_num_threads(threads)


def _trained(rank: int, world_size: int, rounds: int) -> dict[str, float]:
    sizes, plan = (
        mesh(dp=world_size),
        Plan(axes=("dp",), batch="dp:0", parameters={"*": "replicate"}),
    )
    batch = torch.randn(ROWS * world_size, WIDTH, generator=torch.Generator().manual_seed(1))
    calls: dict[str, Callable[[], Any]] = {}
    models = {name: parallelize(network(), sizes, plan) for name in ("eager", "captured")}
    for name, wrap in (("eager", lambda one: one), ("captured", capture)):
        calls[name] = _backward(models[name], wrap(_loss_of(models[name])), batch)
    own = DistributedDataParallel(
        network(), bucket_cap_mb=CAP_BYTES >> 20, gradient_as_bucket_view=True, static_graph=True
    )
    rows = batch[rank * ROWS : (rank + 1) * ROWS]

    def ddp() -> None:
        own.zero_grad()
        own(rows).square().mean().backward()

    calls["torch DDP"] = ddp
    model = parallelize(network(), sizes, plan)
    whole = joint(capture(_loss_of(model)), batch)
    auto = graph.schedule(whole.graph_module, cap_bytes=CAP_BYTES)
    modules = [f"{at}" for at in reversed(range(0, 2 * LAYERS, 2))]
    layers = graph.schedule(whole.graph_module, buckets=modules)
    runs = {
        "joint": whole.graph_module,
        "joint, buckets of 2 MiB": auto.graph_module,
        "joint, a bucket a layer": layers.graph_module,
    }
    for name, run in runs.items():
        calls[name] = _step(model, whole.running(run), batch)
    _check_bits(calls, models["eager"], model, runs)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(_WARM_UP + rounds):
        for name in in_turn(calls, at):
            calls[name]()  # after another's turn nothing is in the caches
            dist.barrier()
            start = time.perf_counter()
            calls[name]()
            if at >= _WARM_UP:
                found[name].append(time.perf_counter() - start)
    told = {name: statistics.median(times) for name, times in found.items()}
    planned = memory.plan(auto.graph_module, solver="rules", seconds=0)
    told |= {"peak": auto.peak_before, "scheduled peak": auto.peak, "planned peak": planned.peak}
    return told


def _loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def _backward(model: nn.Module, call: Callable[[Tensor], Tensor], batch: Tensor) -> Any:
    def step() -> None:
        model.zero_grad()
        call(batch).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            gradient_total(parameter)  # type: ignore[arg-type]

    return step


def _step(model: nn.Module, call: Callable[[Tensor], Any], batch: Tensor) -> Any:
    def step() -> None:
        model.zero_grad()
        call(batch)

    return step


def _check_bits(calls: Any, eager: nn.Module, model: nn.Module, runs: Any) -> None:
    calls["eager"]()
    for name in runs:
        calls[name]()
        for one, other in zip(eager.parameters(), model.parameters(), strict=True):
            if not torch.equal(one.grad.to_local(), other.grad.to_local()):  # type: ignore[union-attr]
                raise RuntimeError(f"{name}: not the gradients of eager mode")
