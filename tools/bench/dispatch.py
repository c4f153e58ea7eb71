"""What an op on a DTensor costs in Python: one thread, 8 x 8 local tensors, a world of 8.

Every case is timed in the same turns for plain torch on a tensor of the local shape, for torch's
own DTensor, and for ours. The process group is torch's fake one, which sends nothing: what is
measured is the work around the op, so collectives count as free.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
import vescale_dtensor
from torch import Tensor, nn
from torch.distributed import tensor as stock
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tools.bench import Ratio
from tools.bench._timing import microseconds, microseconds_once

EXTENT = 8
ROUNDS = 21
PLAIN, STOCK, OURS = "plain torch", "torch DTensor", "ours"

Call = Callable[[], object]
Make = Callable[..., Tensor]
"""`make(dim, ...)`: a tensor sharded on `dim` (None: replicated), one argument per mesh axis."""


def measure(rounds: int = ROUNDS) -> Iterator[Ratio]:
    """Two lines a case: ours against plain torch, and against torch's DTensor."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*DTensor random operators.*")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        sides = _sides(init_device_mesh("cpu", (8,)), init_device_mesh("cpu", (2, 2, 2)))
        for name, case in _CASES.items():
            calls = {side: case(make) for side, make in sides.items()}
            yield from _ratios(name, microseconds(calls, rounds=rounds))
        yield from _ratios("add, first call with a shape", _new_shapes(sides, rounds))
        # Last: there is no plain tensor to compare with.
        for name, case in _DISTRIBUTED.items():
            calls = {side: case(make) for side, make in sides.items() if side != PLAIN}
            yield from _ratios(name, microseconds(calls, rounds=rounds))
    finally:
        dist.destroy_process_group()


def _ratios(name: str, cost: dict[str, float]) -> Iterator[Ratio]:
    ours = cost.pop(OURS)
    for side, reference in cost.items():
        yield Ratio(name, ours, reference, "us", side)


def _sides(line: DeviceMesh, cube: DeviceMesh) -> dict[str, Make]:
    """How each side makes a tensor whose piece on this rank is `extent` x `extent`."""

    def plain(*dims: int | None, extent: int = EXTENT) -> Tensor:
        return torch.ones(extent, extent)

    def theirs(*dims: int | None, extent: int = EXTENT) -> Tensor:
        placements = [stock.Replicate() if d is None else stock.Shard(d) for d in dims]
        mesh = line if len(dims) == 1 else cube
        local = torch.ones(extent, extent)
        return stock.DTensor.from_local(local, mesh, placements)

    def ours(*dims: int | None, extent: int = EXTENT) -> Tensor:
        placements = [
            vescale_dtensor.Replicate() if d is None else vescale_dtensor.Shard(d) for d in dims
        ]
        mesh = line if len(dims) == 1 else cube
        local = torch.ones(extent, extent)
        made: Tensor = vescale_dtensor.DTensor.from_local(local, mesh, placements)
        return made

    return {PLAIN: plain, STOCK: theirs, OURS: ours}


# --- Cases: each takes what makes tensors, and returns what to time.


def _add(make: Make) -> Call:
    x, y = make(0), make(0)
    return lambda: torch.add(x, y)


def _add_on_cube(make: Make) -> Call:
    x, y = make(0, None, 1), make(0, None, 1)
    return lambda: torch.add(x, y)


def _times_number(make: Make) -> Call:
    x = make(0)
    return lambda: x * 2.0


def _mm(make: Make) -> Call:
    x, weight = make(0), make(None)
    return lambda: torch.mm(x, weight)


def _linear(make: Make) -> Call:
    x, weight = make(0), make(None)
    return lambda: F.linear(x, weight)


def _layer_norm(make: Make) -> Call:
    x = make(0)
    return lambda: F.layer_norm(x, (EXTENT,))


def _softmax(make: Make) -> Call:
    x = make(0)
    return lambda: torch.softmax(x, -1)


def _view(make: Make) -> Call:
    x = make(0)
    return lambda: x.view(-1, 2, EXTENT // 2)


def _transpose(make: Make) -> Call:
    x = make(0)
    return lambda: x.transpose(0, 1)


def _slice(make: Make) -> Call:
    x = make(1)  # the cut is along the other dim: nothing needs to move
    return lambda: x[0:4]


def _backward(make: Make) -> Call:
    x, weight = make(0), make(None).requires_grad_()

    def step() -> None:
        weight.grad = None
        torch.mm(x, weight).sum().backward()  # type: ignore[no-untyped-call]

    return step


def _dropout(make: Make) -> Call:
    x = make(0)
    return lambda: F.dropout(x, 0.5, training=True)


def _adamw(make: Make, *, foreach: bool) -> Call:
    parameters = _parameters(make)
    return torch.optim.AdamW(parameters, foreach=foreach).step


def _clip(make: Make) -> Call:
    parameters = _parameters(make)
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)


def _parameters(make: Make) -> Sequence[nn.Parameter]:
    parameters = [nn.Parameter(make(0)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = make(0)
    return parameters


def _shape(make: Make) -> Call:
    x = make(0)
    return lambda: x.shape


def _to_local(make: Make) -> Call:
    x = make(0)
    return lambda: x.to_local()  # type: ignore[attr-defined]


def _gather(make: Make) -> Call:
    x = make(0)
    return lambda: x.redistribute(placements=[stock.Replicate()])  # type: ignore[attr-defined]


_CASES: dict[str, Callable[[Make], Call]] = {
    "add": _add,
    "add, 3-D mesh": _add_on_cube,
    "x * 2.0": _times_number,
    "mm": _mm,
    "F.linear": _linear,
    "F.layer_norm": _layer_norm,
    "softmax": _softmax,
    "view": _view,
    "transpose": _transpose,
    "x[0:4]": _slice,
    "mm + sum + backward": _backward,
    "F.dropout": _dropout,
    "AdamW.step, 20 tensors, for-loop": lambda make: _adamw(make, foreach=False),
    "AdamW.step, 20 tensors, foreach": lambda make: _adamw(make, foreach=True),
    "clip_grad_norm_, 20 tensors": _clip,
    "x.shape": _shape,
}
_DISTRIBUTED: dict[str, Callable[[Make], Call]] = {
    "to_local": _to_local,
    "redistribute S -> R": _gather,
}


def _new_shapes(sides: dict[str, Make], rounds: int) -> dict[str, float]:
    """`add` on the 3-D mesh with extents that have not been seen; layouts are known."""

    def calls(make: Make) -> list[Call]:
        pairs = [[make(0, None, 1, extent=2 * n) for _ in "xy"] for n in range(50, 50 + rounds)]
        return [partial(torch.add, *pair) for pair in pairs]

    return microseconds_once({side: calls(make) for side, make in sides.items()})
