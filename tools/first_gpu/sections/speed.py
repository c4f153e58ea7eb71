"""Ratios: dispatch and steps to plain torch and to torch's DTensor; kernels beside a copy.

Each is timed in turns with its reference, so that what else the machine does hits both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tools.bench._dispatch_cases import CASES as DISPATCH
from tools.bench._timing import microseconds
from tools.first_gpu.cases import Case, CaseResult, figure
from tools.first_gpu.rng_shards import Shard

OPERATORS = ("add", "mm", "F.linear", "softmax", "view", "mm + sum + backward", "F.dropout",
             "AdamW.step, 200, fused")  # fmt: skip
TURNS = 9


def cases(device: torch.device) -> list[Case]:
    """Steps, then operators, then kernels."""
    small = (128, 4, 8, 128) if device.type == "cuda" else (64, 2, 2, 32)
    return [
        Case("a step, small decoder", partial(_steps, *small)),
        Case("a step, wider decoder", partial(_steps, 1024, 4, 8, 512), ("cuda",)),
        *(Case(f"dispatch of {name}", partial(_dispatch, name)) for name in OPERATORS),
        Case("normal, a shard by kernel", partial(_drawn, "native"), ("triton gpu",)),
        Case("normal, portable", partial(_drawn, "portable"), ("triton gpu",)),
        Case("dropout of a shard", _dropped, ("triton gpu",)),
        Case("quantise int8", _quantised, ("triton gpu",)),
        Case("fold of 4", _folded, ("triton gpu",)),
        Case("sums in rank order", _ordered, ("cuda",)),
        Case("a save", _saved),
    ]


def _synchronised(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_turns(
    calls: Mapping[str, Callable[[], object]], device: torch.device, turns: int = TURNS
) -> dict[str, float]:
    """Median seconds of each, the device's work included."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 2):
        for name, call in calls.items():
            _synchronised(device)
            start = time.perf_counter()
            call()
            _synchronised(device)
            # The first turns load kernels and find out.
            if turn > 1:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(one) for name, one in times.items()}


def _steps(dim: int, layers: int, rows: int, length: int, device: torch.device) -> CaseResult:
    """A training step of the trainer's decoder on a mesh of one rank, in several ways."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from vescale_parallel import Plan, mesh, parallelize
    from vescale_parallel.train.model import Decoder, ModelConfig

    config = ModelConfig(dim=dim, layers=layers, heads=8, kv_heads=8, hidden=dim * 11 // 4,
                         context=length, dropout=0.0)  # fmt: skip
    here = mesh(dp=1, device_type=device.type)

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return Decoder(config).to(device)

    def ours(**words: Any) -> nn.Module:
        static = words.pop("static", False)
        plan = Plan(batch="dp:0", parameters={"*": "replicate"}, **words)
        return parallelize(plain(), here, plan, static=static)

    def fsdp() -> nn.Module:
        model: Any = plain()
        one = init_device_mesh(device.type, (1,))
        for block in model.blocks:
            fully_shard(block, mesh=one)
        fully_shard(model, mesh=one)
        return model  # type: ignore[no-any-return]

    tokens = torch.randint(256, (rows, length), device=device)
    makers: dict[str, Callable[[], nn.Module]] = {
        "plain torch": plain, "eager": ours, "static": lambda: ours(static=True),
        "zero 3": lambda: ours(zero=3), "zero 3 static": lambda: ours(zero=3, static=True),
        "FSDP2": fsdp,
    }  # fmt: skip
    try:
        calls = {name: _stepped(make(), tokens) for name, make in makers.items()}
        seconds = _in_turns(calls, device)
    finally:
        dist.destroy_process_group()
    reference = seconds.pop("plain torch")
    text = ", ".join(f"{name} {one / reference:.2f}" for name, one in seconds.items())
    return figure(f"{text} x plain torch's {reference * 1e3:.1f} ms")


def _stepped(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()

    return step


def _dispatch(name: str, device: torch.device) -> CaseResult:
    """What an operator costs the host, in a world of 8 that sends nothing."""
    import vescale_dtensor
    from torch.distributed import tensor as stock
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh(device.type, (8,))

        def makes(kind: Any, names: Any) -> Callable[..., Tensor]:
            def make(*dims: int | None, extent: int = 8) -> Tensor:
                local = torch.ones(extent, extent, device=device)
                if kind is None:
                    return local
                placed = [names.Replicate() if d is None else names.Shard(d) for d in dims]
                made: Tensor = kind.from_local(local, mesh, placed)
                return made

            return make

        case = DISPATCH[name][0]
        calls = {
            "plain": case(makes(None, None)),
            "stock": case(makes(stock.DTensor, stock)),
            "ours": case(makes(vescale_dtensor.DTensor, vescale_dtensor)),
        }
        cost = microseconds(calls, rounds=TURNS)
    finally:
        dist.destroy_process_group()
    ours = cost["ours"]
    return figure(
        f"{ours / cost['plain']:.2f} x plain torch ({cost['plain']:.1f} us), "
        f"{ours / cost['stock']:.2f} x torch's DTensor"
    )


def _beside_a_copy(
    call: Callable[[], object], moved: int, device: torch.device, what: str = ""
) -> CaseResult:
    """GB/s of a kernel that moves so many bytes, beside a copy of as many."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _in_turns({"it": call, "copy": lambda: target.copy_(source)}, device)
    rates = {name: moved / one / 1e9 for name, one in seconds.items()}
    return figure(f"{rates['it']:.0f} GB/s, a copy {rates['copy']:.0f} GB/s{what}")


def _drawn(policy: Any, device: torch.device) -> CaseResult:
    """A shard of columns, which torch alone could not draw without the rest."""
    from vescale_rng import Normal, fill_, layout_of, use

    layout: Any = layout_of((8192, 16384), [Shard(1)], (2,), (1,))
    local = torch.empty(layout.local_shape, device=device)

    def draw() -> None:
        with use(policy):
            fill_(local, Normal(), layout)

    whole = torch.empty(8192, 8192, device=device)
    plain = _in_turns({"it": whole.normal_}, device)["it"]
    return _beside_a_copy(draw, local.nbytes, device,
                          f", normal_ of as many {local.nbytes / plain / 1e9:.0f}")  # fmt: skip


def _dropped(device: torch.device) -> CaseResult:
    import torch.nn.functional as F
    from vescale_rng import dropout, layout_of

    layout: Any = layout_of((8192, 16384), [Shard(1)], (2,), (1,))
    x = torch.ones(layout.local_shape, device=device)
    plain = _in_turns({"it": lambda: F.dropout(x, 0.1)}, device)["it"]
    return _beside_a_copy(lambda: dropout(x, 0.1, layout), 2 * x.nbytes, device,
                          f", F.dropout of as many {2 * x.nbytes / plain / 1e9:.0f}")  # fmt: skip


def _quantised(device: torch.device) -> CaseResult:
    from vescale_comm._wire import kernels

    x = torch.randn(2**26, device=device)
    return _beside_a_copy(lambda: kernels.quantise(x, "int8"), x.nbytes + x.numel(), device)


def _folded(device: torch.device) -> CaseResult:
    from vescale_comm._wire import kernels

    scales, values = kernels.quantise(torch.randn(2**25, device=device), "int8")
    four = (scales.repeat(4, 1), values.repeat(4, 1))
    moved = four[1].nbytes + 4 * values.numel()
    return _beside_a_copy(lambda: kernels.fold(*four), moved, device)


def _ordered(device: torch.device) -> CaseResult:
    """A sum of four members in rank order, as the fold of bf16 gradients does it."""
    from vescale_comm import Emulator

    xs = [torch.randn(2**23, device=device, dtype=torch.bfloat16) for _ in range(4)]
    emulator = Emulator(4)
    calls = {
        "ordered": lambda: emulator.all_reduce(xs, order="rank"),
        "native": lambda: emulator.all_reduce(xs),
    }
    seconds = _in_turns(calls, device)
    return figure(f"{seconds['ordered'] / seconds['native']:.2f} x sums as they come")


def _saved(device: torch.device) -> CaseResult:
    """A checkpoint of 64 MiB, beside a copy to the host and what the training waits for."""
    import os
    import tempfile

    from vescale_ckpt import Staging, async_save, save

    state = {f"w{at}": torch.ones(2**22, device=device) for at in range(4)}
    staging = Staging()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "step")
        times: list[float] = []

        def later() -> None:
            start = time.perf_counter()
            handle = async_save(path, state, overwrite=True, staging=staging)
            times.append(time.perf_counter() - start)
            handle.wait()

        calls: dict[str, Callable[[], object]] = {
            "save": lambda: save(path, state, overwrite=True),
            "async": later,
            "copy": lambda: [one.to("cpu", copy=True) for one in state.values()],
        }
        seconds = _in_turns(calls, device, turns=3)
    waited = statistics.median(times[2:])
    return figure(
        f"save {seconds['save'] * 1e3:.0f} ms, async_save holds up {waited * 1e3:.0f} ms, "
        f"a copy to the host {seconds['copy'] * 1e3:.0f} ms"
    )
