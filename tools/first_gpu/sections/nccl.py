"""A group of one rank, by NCCL on a GPU and by gloo on the CPU: made, called, closed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.first_gpu.cases import Case, CaseResult, both, holds, same_bits

WAYS = ("by mesh()", "by init_process_group", "bound to its device")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
          torch.uint8, torch.bool, torch.complex64, torch.int16)  # fmt: skip


def cases(device: torch.device) -> list[Case]:
    """One group after the other: each case makes its own, and closes it."""
    return [
        *(Case(f"each collective, {way}", partial(_each, way)) for way in WAYS),
        Case("dtypes", _dtypes),
        Case("a message first", _message_first),
        Case("plans on one rank", _plans),
        Case("mesh() keeps the device", _keeps_device, ("cuda",)),
        Case("saved and loaded", _saved),
    ]


def _group(way: str, device: torch.device) -> Any:
    """The group of one rank, by this way."""
    from vescale_comm import as_group, group_of
    from vescale_parallel import mesh

    if way == WAYS[0]:
        return group_of(mesh(device_type=device.type, dp=1), "dp")
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound: Any = {"device_id": device} if way == WAYS[2] and device.type == "cuda" else {}
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=30), **bound
    )
    return as_group(None)


def _closed(ask: Callable[[Any], CaseResult], way: str, device: torch.device) -> CaseResult:
    """Ask something of a group, and close it."""
    try:
        found = ask(_group(way, device))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return both(found, holds("the group is closed", not dist.is_initialized(), "closed"))


def _each(way: str, device: torch.device) -> CaseResult:
    def ask(group: Any) -> CaseResult:
        return same_bits(_collectives(group, device), "its own values")

    return _closed(ask, way, device)


def _collectives(group: Any, device: torch.device) -> dict[str, Any]:
    """What each collective of one rank gives, in each order and wire, with gradients."""
    import vescale_comm as comm

    x = torch.arange(12.0, device=device).view(3, 4)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce": lambda x: comm.all_reduce(x, group),
        "all_reduce, avg": lambda x: comm.all_reduce(x, group, op="avg"),
        "all_reduce, order rank": lambda x: comm.all_reduce(x, group, order="rank"),
        "all_reduce, wire bf16": lambda x: comm.all_reduce(x, group, wire="bf16"),
        "all_gather": lambda x: comm.all_gather(x, group, dim=1),
        "reduce_scatter": lambda x: comm.reduce_scatter(x, group, dim=1),
        "all_to_all": lambda x: comm.all_to_all([x], group, shapes=[x.shape])[0],
        "all_to_all_single": lambda x: comm.all_to_all_single(
            x.flatten(), group, sizes=comm.SplitSizes([12], [12])
        ).view(3, 4),
        "broadcast": lambda x: comm.broadcast(x, group),
        "scatter": lambda x: comm.scatter(x, group, dim=0),
        "permute": lambda x: comm.permute(x, group, pairs=[(0, 0)], shape=x.shape),
        "gather_pieces": lambda x: comm.gather_pieces(x, group, shapes=[x.shape])[0],
    }
    pairs: dict[str, Any] = {}
    for name, call in calls.items():
        leaf = x.clone().requires_grad_()
        result = call(leaf)
        result.square().sum().backward()  # type: ignore[no-untyped-call]
        pairs[name] = (x, result.detach())
        pairs[f"{name}, gradient"] = (2 * x, leaf.grad)
    waited: Any = comm.all_reduce(x, group, async_op=True)
    pairs["all_reduce, asynchronous"] = (x, waited.wait())
    bucketed = comm.all_reduce_bucketed([x, x + 1], group)
    pairs |= {f"bucketed {at}": (x + at, one) for at, one in enumerate(bucketed)}
    comm.barrier(group)
    return pairs | _launched(group, device)


def _launched(group: Any, device: torch.device) -> dict[str, Any]:
    """The same by the backend: vescale-comm does not ask it about one rank."""
    from vescale_comm._engine import primitives as p

    x, total, one = torch.arange(12.0, device=device), dist.ReduceOp.SUM, (12,)

    def made(kind: Any, *rest: Any) -> Any:
        return kind("first_gpu", group, 0, x, *rest)

    calls = {
        "all_reduce": made(p.Reduce, x.clone(), total),
        "reduce": made(p.Reduce, x.clone(), total, 0),
        "all_gather": made(p.AllGather, x, torch.zeros_like(x), one),
        "reduce_scatter": made(p.ReduceScatter, x, torch.zeros_like(x), one, total),
        "all_to_all": made(p.AllToAll, x, torch.zeros_like(x), one, one),
        "broadcast": made(p.Broadcast, x.clone(), 0),
    }
    for call in calls.values():
        call.launch(group.process_group, False)
    made(p.Barrier).launch(group.process_group, False)
    return {f"{name}, by the backend": (x, call.written()[0]) for name, call in calls.items()}


def _dtypes(device: torch.device) -> CaseResult:
    import vescale_comm as comm

    def ask(group: Any) -> CaseResult:
        pairs: dict[str, Any] = {}
        for dtype in DTYPES:
            x = torch.tensor([0, 1, 1, 0, 1], device=device).to(dtype)
            op = "bor" if dtype in (torch.bool, torch.uint8) else "sum"
            pairs[f"{op} of {dtype}"] = (x, comm.all_reduce(x, group, op=op))
            pairs[f"gathered {dtype}"] = (x, comm.all_gather(x, group))
        empty = torch.empty(0, 3, device=device)
        pairs["nothing"] = (empty, comm.all_gather(empty, group))
        strided = torch.arange(12.0, device=device).view(3, 4).t()
        pairs["strided"] = (strided, comm.all_reduce(strided, group))
        return same_bits(pairs, "its own values")

    return _closed(ask, WAYS[0], device)


def _message_first(device: torch.device) -> CaseResult:
    """A message to itself before any collective of the group."""
    import vescale_comm as comm

    def ask(group: Any) -> CaseResult:
        x = torch.arange(5.0, device=device)
        moved = comm.permute(x, group, pairs=[(0, 0)], shape=x.shape)
        return same_bits({"permute": (x, moved)}, "its own values")

    return _closed(ask, WAYS[1], device)


def _plans(device: torch.device) -> CaseResult:
    """Plans of every kind on a mesh of one rank: what is trained is one device's model."""
    from tools.first_gpu.cases import alike
    from tools.first_gpu.models import (
        TRAININGS,
        Training,
        built,
        one_device,
        parallelised,
        step_of,
        train,
    )

    pairs: dict[str, Any] = {}
    for name in ("dp=2 tp=2 zero 3, sequence parallel", "cp=2", "ep=2", "pp=2 1f1b"):
        of = TRAININGS[name]
        alone = Training({axis: 1 for axis in of.sizes}, of.words, of.model,
                         microbatches=of.microbatches)  # fmt: skip
        torch.manual_seed(0)
        expected = train(built(of.model, device), one_device(of), device)
        try:
            torch.manual_seed(0)
            found = train(parallelised(alone, device), step_of(alone), device)
        finally:
            dist.destroy_process_group()
        pairs |= {f"{name}: {key}": (one, found[key]) for key, one in expected.items()}
    return alike(pairs)


def _keeps_device(device: torch.device) -> CaseResult:
    """The caller's current device stays where there are several; `mesh` needs no LOCAL_RANK."""
    from vescale_parallel import mesh

    last = torch.cuda.device_count() - 1
    before = torch.cuda.current_device()
    torch.cuda.set_device(last)
    try:
        mesh(dp=1, device_type="cuda")
        found = torch.cuda.current_device()
    finally:
        torch.cuda.set_device(before)
        if dist.is_initialized():
            dist.destroy_process_group()
    return holds(f"device {last}, which the caller has set", found == last, f"device {found}")


def _saved(device: torch.device) -> CaseResult:
    """A checkpoint of a parallelised model, by a group of one rank."""
    from vescale_ckpt import load, save

    from tools.first_gpu.models import TRAININGS, Training, parallelised, whole

    of = TRAININGS["dp=2 zero 3"]
    alone = Training({"dp": 1}, of.words)
    try:
        model = parallelised(alone, device)
        expected = {name: whole(one).clone() for name, one in model.named_parameters()}
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "step")
            save(path, {"model": model.state_dict()})
            with torch.no_grad():
                for one in model.parameters():
                    one.zero_()
            load(path, into={"model": model.state_dict()})
        pairs = {n: (expected[n], whole(one)) for n, one in model.named_parameters()}
    finally:
        dist.destroy_process_group()
    return same_bits(pairs, "what was saved")
