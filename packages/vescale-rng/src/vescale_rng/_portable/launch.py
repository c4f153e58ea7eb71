"""Launches the kernel on tiles, for the maps that it has."""

from contextlib import nullcontext
from math import prod

import torch

from vescale_rng._layout.layout import ShardLayout
from vescale_rng._portable.maps import FusedMap, Map
from vescale_rng._portable.tiles import Tile, split_outer, tiles_of
from vescale_rng._portable.triton_kernel import fill_tile

_LANES = 256
# A fused product and sum is rounded once; every other implementation rounds twice.
OPTIONS = {"enable_fp_fusion": False}
# Of the outer dims of a tile; further ones are split on the host.
_DIMS = 3


def launch_fill(
    local: torch.Tensor, kind: Map, fused: FusedMap, layout: ShardLayout, key: torch.Tensor
) -> None:
    """Fill `local` by the kernel.

    Args:
        local: the local tensor, on the device of `key`.
        kind: the map.
        fused: its form for the kernel.
        layout: which elements `local` holds.
        key: int64, one element.
    """
    bytes_of_bools = local.view(torch.uint8) if local.dtype == torch.bool else local
    # Triton launches on the current device, which need not be that of the tensor.
    with torch.cuda.device(local.device) if local.is_cuda else nullcontext():
        for whole in tiles_of(layout):
            for tile in split_outer(whole, _DIMS):
                _launch(bytes_of_bools, kind, fused, tile, key)


def _launch(local: torch.Tensor, kind: Map, fused: FusedMap, tile: Tile, key: torch.Tensor) -> None:
    missing = _DIMS + 1 - len(tile.sizes)
    runs, length = prod(tile.sizes[:-1]), tile.sizes[-1]
    _, n1, n2, _ = (1,) * missing + tile.sizes
    strides = ((0,) * missing + tile.strides)[:_DIMS]
    local_strides = (0,) * missing + tile.local_strides
    # Enough for a run wherever in a block it begins.
    regular = all(stride % 4 == 0 for stride in strides)
    run_blocks = ((tile.start % 4 if regular else 3) + length + 3) // 4
    out = local.as_strided((1,), (1,), local.storage_offset() + tile.local_offset)
    high, low = kind.rounded(local.dtype)
    fill_tile[(-(-runs * run_blocks // _LANES),)](
        *(out, key, tile.start, runs, run_blocks, length, n1, n2),
        *(*strides, *local_strides, fused.a, fused.b, high, low),
        KIND=fused.kind,
        EXCLUDED=kind.excluded is not None,
        LANES=_LANES,
        **OPTIONS,
    )
