"""Checks what only a GPU has: waves, draws under a CUDA graph, very large tensors."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.first_gpu.cases import Case, CaseResult, holds, same_bits
from tools.first_gpu.paths import of_tests
from tools.first_gpu.rng_shards import Shard, many, parts, short


def cases() -> list[Case]:
    """The cases."""
    return [
        Case("captured draws go on with the stream", _captured, ("triton gpu",)),
        Case("waves, without kernels", _waves, ("cuda",)),
        Case("finding out disturbs no generator", _undisturbed, ("cuda",)),
        Case("first drawn while a graph is captured", _refused, ("cuda",)),
        Case("several launches", _launches, ("cuda",)),
    ]


def _captured(device: torch.device) -> CaseResult:
    """Draws with a `GraphGenerator` under a CUDA graph, replayed."""
    from vescale_rng import Normal, dropout, fill_, layout_of
    from vescale_rng.cuda import GraphGenerator
    from vescale_rng.streams import position

    layout: Any = layout_of((3000, 1001), [Shard(1)], (2,), (1,))
    generator = torch.Generator(device)
    generator.manual_seed(11)
    local, x = (torch.ones(layout.local_shape, device=device) for _ in range(2))
    warm = torch.Generator(device)
    warm.manual_seed(0)
    elsewhere = GraphGenerator.of(warm)
    fill_(local, Normal(), layout, elsewhere)
    dropout(x, 0.5, layout, elsewhere)
    in_memory = GraphGenerator.of(generator)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_(local, Normal(), layout, in_memory)
        dropped = dropout(x, 0.5, layout, in_memory)
    pairs: dict[str, Any] = {}
    default = torch.cuda.default_generators[device.index or 0]
    for turn in range(3):
        graph.replay()
        expected = torch.empty(3000, 1001, device=device).normal_(generator=generator)
        ((at, view),) = parts(local, layout)
        pairs[f"normal, replay {turn}"] = (expected[at], view.clone())
        with torch.random.fork_rng([device]):
            default.set_state(generator.get_state())
            kept = F.dropout(torch.ones(3000, 1001, device=device), 0.5)
            generator.set_state(default.get_state())
        pairs[f"dropout, replay {turn}"] = (kept[at], dropped.clone())
    end = in_memory.position(), position(generator)
    pairs["where the generator ends"] = (str(end[1]), str(end[0]))
    return same_bits(pairs, "what eager draws, at each replay")


def _waves(device: torch.device) -> CaseResult:
    """Torch itself draws the shards, as where a kernel is not right."""
    from vescale_rng._cuda.device import cuda_device

    table = of_tests("rng", "cuda_table")
    of = cuda_device(device.index or 0)
    waves, size, pairs = table.ByWaves(of), many(device), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for distribution, dtype in table.KINDS[:: len(table.KINDS) // 8]:
            at = table.first_difference(of, waves, distribution, dtype, size)
            pairs[f"{distribution}, {short(dtype)}, first difference"] = (None, at)
    return same_bits(pairs, "torch's bits, for each shard")


def _undisturbed(device: torch.device) -> CaseResult:
    from vescale_rng import LogNormal, dropout, fill_, layout_of, whole

    before = torch.cuda.get_rng_state(device), torch.get_rng_state()
    own = torch.Generator(device)
    nothing = layout_of((3, 7), [Shard(0)], (4,), (3,))
    fill_(torch.empty(0, 7, device=device), LogNormal(), nothing, own)
    dropout(torch.ones(9, device=device), 0.5, whole((9,)), own)
    after = torch.cuda.get_rng_state(device), torch.get_rng_state()
    return same_bits({"CUDA's": (before[0], after[0]), "the host's": (before[1], after[1])},
                     "the default generators stay")  # fmt: skip


def _refused(device: torch.device) -> CaseResult:
    """What would have to be found out while a graph is captured is an error in words."""
    from vescale_rng import DeviceError, Uniform, fill_, layout_of
    from vescale_rng.cuda import GraphGenerator

    layout: Any = layout_of((33, 3), [Shard(0)], (2,), (1,))
    local = torch.empty(layout.local_shape, dtype=torch.float64, device=device)
    generator = GraphGenerator.of(torch.Generator(device))
    said = "nothing"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # An empty graph would warn.
        local.add_(1)
        try:
            fill_(local, Uniform(0.25, 0.5), layout, generator)
        except DeviceError as error:
            said = str(error)
    torch.cuda.synchronize()
    return holds("it says to run it once before", "run it once before" in said, said[:100])


def _launches(device: torch.device) -> CaseResult:
    """A tensor that torch draws in several launches."""
    from vescale_rng import Uniform, fill_, layout_of

    size = 2**29 + 12_345
    if torch.cuda.mem_get_info(device)[0] < 4 * 4 * size:
        return holds("needs 9 GB of free memory", True, "there is less, so it was not tried")

    def seeded() -> torch.Generator:
        generator = torch.Generator(device)
        generator.manual_seed(2)
        return generator

    expected: Tensor = torch.empty(size, device=device).uniform_(generator=seeded())
    pairs = {}
    for ranks, rank in ((8, 0), (8, 3), (8, 4), (8, 7), (3, 1)):
        layout: Any = layout_of((size,), [Shard(0)], (ranks,), (rank,))
        local = torch.empty(layout.local_shape, device=device)
        fill_(local, Uniform(), layout, seeded())
        ((at, view),) = parts(local, layout)
        # On the device: the host would take longer to compare than all else.
        pairs[f"rank {rank} of {ranks}"] = (True, torch.equal(view, expected[at]))
    return same_bits(pairs, "torch's bits, for each shard")
