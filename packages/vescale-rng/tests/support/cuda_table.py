"""The table that `nox -s gpu` prints: what is equal to torch on this device, and where it is not.

Every distribution and dtype is drawn in pieces by the kernel and by waves, for sizes around every
boundary of the map, and compared with torch's own call, byte for byte.
"""

import warnings
from dataclasses import replace

import torch
from rng_pieces import FLOATS, Shard
from vescale_rng import (
    Bernoulli,
    Cauchy,
    DistributionError,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Random,
    Uniform,
    layout_of,
)
from vescale_rng._cuda import fill as native
from vescale_rng._cuda.generator_state import CudaPosition
from vescale_rng._cuda.map_check import Routes, same_bits
from vescale_rng._layout.fill_plan import plan_for

PLACE = CudaPosition(0x0123456789ABCDEF, 4 * (2**32 - 3))
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SOME = (Uniform(-0.3, 1.7), Normal(0.1, 0.7), LogNormal(0.1, 0.7), Exponential(1.3),
        Cauchy(0.1, 0.7), Bernoulli(0.3))  # fmt: skip
# float32 of each comes first, as that tells most.
KINDS = [
    *((one, dtype) for dtype in FLOATS for one in SOME),
    *((Bernoulli(0.3), dtype) for dtype in (*INTEGERS, torch.bool)),
    *((RandInt(-5, 2**40), dtype) for dtype in (torch.int64,)),
    *((RandInt(-(2**20), 2**29), dtype) for dtype in (torch.int64, torch.int32)),
    *((Geometric(0.3), dtype) for dtype in (*FLOATS, *INTEGERS)),
    *((RandInt(0, 100), dtype) for dtype in (*FLOATS, *INTEGERS)),
    *((RandInt(-7, None), dtype) for dtype in (torch.float32, torch.int64, torch.int16)),
    *((Random(), dtype) for dtype in (*FLOATS, *INTEGERS, torch.bool)),
    *((one, dtype) for dtype in FLOATS for one in (Uniform(), Normal())),
]


def sizes_of(threads):
    """Elements around every boundary: one, a block, all threads, a turn, many turns."""
    turn = 4 * threads
    return [1, 255, 256, 257, threads - 1, threads, threads + 1, turn - 1, turn, turn + 1,
            20 * threads + 777]  # fmt: skip


class ByWaves(Routes):
    """Never the kernel, also where it would do."""

    def route(self, distribution, dtype):
        return replace(super().route(distribution, dtype), kernel=False, why="not asked for")


def first_difference(device, routes, distribution, dtype, size):
    """The first element of three pieces that is not torch's, -1 if the offset is not; or None."""
    expected = torch.empty(size, dtype=dtype, device=device.device)
    end = device.draw(distribution, expected, PLACE)
    found = torch.zeros_like(expected)
    for rank in range(3):
        layout = layout_of((size,), [Shard(0)], (3,), (rank,))
        local = torch.empty(layout.local_shape, dtype=dtype, device=device.device)
        plan = plan_for(layout, local)
        words = native.fill_from(plan, distribution, local, PLACE, routes, device, device.threads)
        if PLACE.offset + words != end:
            return -1
        for box in layout.boxes:
            found[box.global_offset[0] :][: box.shape[0]] = local
    if same_bits(found, expected):
        return None
    bytes_of = expected.view(torch.uint8) != found.view(torch.uint8)
    return int(bytes_of.nonzero()[0]) // expected.element_size()


def table(device, kinds=KINDS):
    """Rows of (distribution, dtype, path, why not, first differences by size)."""
    routes, waves = Routes(device), ByWaves(device)
    rows = []
    for distribution, dtype in kinds:
        with warnings.catch_warnings():
            # What a warning says is in the row.
            warnings.simplefilter("ignore")
            try:
                route = routes.route(distribution, dtype)
            except DistributionError as error:
                rows.append((distribution, dtype, "refused", str(error), []))
                continue
            sizes = sizes_of(device.threads)
            for path, through in (("kernel", routes), ("waves", waves)):
                if path == "kernel" and not route.kernel:
                    rows.append((distribution, dtype, path, route.why, []))
                    continue
                found = [first_difference(device, through, distribution, dtype, n) for n in sizes]
                rows.append((distribution, dtype, path, "", found))
    return rows


def lines(device, rows):
    """The table as text."""
    sizes = sizes_of(device.threads)
    yield f"{device.device}, {device.threads} threads, torch {torch.__version__}"
    yield f"{'distribution':44} {'dtype':9} {'path':7} " + " ".join(f"{n:>9}" for n in sizes)
    for distribution, dtype, path, why, found in rows:
        cells = " ".join(f"{'equal' if at is None else at:>9}" for at in found) or why
        yield f"{distribution!s:44} {str(dtype).removeprefix('torch.'):9} {path:7} {cells}"
