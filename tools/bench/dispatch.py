"""Times an op on a DTensor in Python: one thread, 8 x 8 local tensors, a world of 8.

Every case is timed in the same turns for plain torch on a tensor of the local shape, for torch's
own DTensor, and for ours. The process group is torch's fake one, which sends nothing: what is
measured is the work around the op, so collectives count as free. Nor are ranks compared in such a
world: where they are, a known call costs some 3 % more, for the lineage of its result.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
import vescale_dtensor
from torch import Tensor
from torch.distributed import tensor as stock
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tools.bench import Ratio
from tools.bench._dispatch_cases import CASES, DISTRIBUTED, EXTENT, Call, Make
from tools.bench._dispatch_models import block, has_hugging_face, hugging_face
from tools.bench._timing import microseconds, microseconds_once

ROUNDS = 21
PLAIN, STOCK, OURS = "plain torch", "torch DTensor", "ours"
KINDS = {PLAIN: "plain", STOCK: "stock", OURS: "ours"}
Goals = tuple[float | None, float | None]


def measure(rounds: int = ROUNDS) -> Iterator[Ratio]:
    """Two lines a case: ours against plain torch, and against torch's DTensor."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*DTensor random operators.*")
    logging.getLogger("vescale_dtensor").setLevel(logging.ERROR)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        line = init_device_mesh("cpu", (8,))
        sides = _sides(line)
        for name, (case, *goals) in CASES.items():
            calls = {side: case(make) for side, make in sides.items()}
            yield from _ratios(name, microseconds(calls, rounds=rounds), (goals[0], goals[1]))
        yield from _ratios("add, first with a shape", _new_shapes(sides, rounds), (None, 0.01))
        yield from _ratios("add, first with layouts", _new_layouts(sides), (None, 0.05))
        for name, (case, *goals) in DISTRIBUTED.items():
            calls = {side: case(make) for side, make in sides.items() if side != PLAIN}
            yield from _ratios(name, microseconds(calls, rounds=rounds), (goals[0], goals[1]))
        yield from _models(line, rounds)
    finally:
        dist.destroy_process_group()


def _models(mesh: DeviceMesh, rounds: int) -> Iterator[Ratio]:
    cases: dict[str, tuple[Callable[[str, DeviceMesh], Call], Goals]] = {
        "Llama-style block, fwd + bwd": (block, (1.3, 0.4)),
    }
    if has_hugging_face():
        cases["Hugging Face Llama, step"] = hugging_face, (1.2, 0.4)
    for name, (make, goals) in cases.items():
        calls = {side: make(kind, mesh) for side, kind in KINDS.items()}
        yield from _ratios(name, microseconds(calls, rounds=rounds), goals)


def _ratios(name: str, cost: dict[str, float], goals: Goals) -> Iterator[Ratio]:
    ours = cost.pop(OURS)
    aimed = dict(zip((PLAIN, STOCK), goals, strict=True))
    for side, reference in cost.items():
        yield Ratio(name, ours, reference, "us", side, aimed[side])


def _sides(line: DeviceMesh) -> dict[str, Make]:
    """How each side makes a tensor whose piece on this rank is `extent` x `extent`."""
    meshes = {1: line, 2: init_device_mesh("cpu", (4, 2)), 3: init_device_mesh("cpu", (2, 2, 2))}

    def plain(*dims: int | None, extent: int = EXTENT) -> Tensor:
        return torch.ones(extent, extent)

    def theirs(*dims: int | None, extent: int = EXTENT) -> Tensor:
        placements = [stock.Replicate() if d is None else stock.Shard(d) for d in dims]
        return stock.DTensor.from_local(torch.ones(extent, extent), meshes[len(dims)], placements)

    def ours(*dims: int | None, extent: int = EXTENT) -> Tensor:
        placements = [
            vescale_dtensor.Replicate() if d is None else vescale_dtensor.Shard(d) for d in dims
        ]
        made: Tensor = vescale_dtensor.DTensor.from_local(
            torch.ones(extent, extent), meshes[len(dims)], placements
        )
        return made

    return {PLAIN: plain, STOCK: theirs, OURS: ours}


def _new_shapes(sides: dict[str, Make], rounds: int) -> dict[str, float]:
    """`add` on the 3-D mesh with extents that have not been seen; layouts are known."""

    def calls(make: Make) -> list[Call]:
        pairs = [[make(0, None, 1, extent=2 * n) for _ in "xy"] for n in range(50, 50 + rounds)]
        return [partial(torch.add, *pair) for pair in pairs]

    known = {
        side: partial(torch.add, *(make(0, None, 1) for _ in "xy")) for side, make in sides.items()
    }
    return microseconds_once({side: calls(make) for side, make in sides.items()}, known)


def _new_layouts(sides: dict[str, Make]) -> dict[str, float]:
    """`sub` on the 3-D mesh, each time of operands in layouts that it has not seen."""
    layouts = list(product((0, None, 1), repeat=3))

    def calls(make: Make) -> list[Call]:
        pairs = [[make(*dims, extent=16) for _ in "xy"] for dims in layouts]
        return [partial(torch.sub, *pair) for pair in pairs]

    known = {
        side: partial(torch.sub, *(make(0, None, 1) for _ in "xy")) for side, make in sides.items()
    }
    return microseconds_once({side: calls(make) for side, make in sides.items()}, known)
