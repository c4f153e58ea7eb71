"""What adding bfloat16 terms in float32 costs: bytes and time, against the backend's own sums.

On 4 gloo ranks of one machine. The third column of a line is what is compared with: gloo's sum of
halves (`half_sums("native")`), or a sum of tensors that were cast to float32 beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vescale_comm import trace
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import DTensor, Partial, Replicate, Shard, half_sums

SHAPES = {"4 MB": (2048, 1024), "8 KB": (64, 64), "8 bytes": (4,)}
TARGETS = {"all": Replicate(), "shard": Shard(0)}
TURNS = 15


def measure() -> Iterator[Any]:
    """Two lines for each size and target, and two for what casting would cost."""
    from tools.bench import Ratio

    for size, shape in SHAPES.items():
        for target in TARGETS:
            found = run(_measured, 4, shape, target)[0]
            for against in ("native", "cast"):
                for unit, index in (("bytes", 0), ("ms", 1)):
                    values = found["float32"][index], found[against][index]
                    scale = 1e3 if unit == "ms" else 1
                    ours, reference = (value * scale for value in values)
                    yield Ratio(f"{size} to {target}, {unit}", ours, reference, unit, against)


def _measured(rank: int, world: int, shape: tuple[int, ...], target: str) -> dict[str, Any]:
    mesh = device_mesh((world,), ("dp",))
    local = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).bfloat16()

    def reduced(cast: bool = False) -> Tensor:
        # A tensor of its own at each turn: what was reduced once is not sent again.
        x = DTensor.from_local(local.clone(), mesh, [Partial()], shape=shape, stride=local.stride())
        x = x.float() if cast else x
        found = x.redistribute(placements=[TARGETS[target]]).to_local()
        return found.bfloat16() if cast else found

    def native() -> Tensor:
        with half_sums("native"):
            return reduced()

    calls = {"float32": reduced, "native": native, "cast": lambda: reduced(cast=True)}
    sent = {name: _bytes(call) for name, call in calls.items()}
    times = _in_turns(calls)
    return {name: (sent[name], times[name]) for name in calls}


def _bytes(call: Callable[[], Tensor]) -> int:
    with trace() as seen:
        call()
    return seen.bytes()


def _in_turns(calls: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Median seconds of each, one after the other, all ranks starting together."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: sorted(found)[TURNS // 2] for name, found in times.items()}
