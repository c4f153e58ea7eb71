"""Fill the local boxes of a tensor under the portable policy."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from vescale_rng._cpu.draw_order import draw_order_of
from vescale_rng._distributions import Distribution
from vescale_rng._layout.layout import ShardLayout
from vescale_rng._portable.arrays import Arrays
from vescale_rng._portable.functions import DOUBLE, SINGLE, minus_log
from vescale_rng._portable.maps import Map, map_of
from vescale_rng._portable.numpy_arrays import NumpyArrays
from vescale_rng._portable.tiles import Tile, cut_tile, tiles_of
from vescale_rng._portable.torch_arrays import TorchArrays

# Blocks of one tile: on CPU the working set of some ten arrays stays in the cache of a core; on a
# GPU there must be work for all of it.
_CPU_BLOCKS = 1 << 13
_DEVICE_BLOCKS = 1 << 20


def check(distribution: Distribution, dtype: torch.dtype) -> None:
    """Refuse what cannot be drawn, before any key is.

    Raises:
        DistributionError: torch does not draw this distribution for this dtype either.
        PolicyError: torch does, the portable policy does not.
    """
    # The parameters and dtypes are torch's: it is asked, on CPU, for a few numbers.
    draw_order_of(distribution, dtype, 0, contiguous=True)
    map_of(distribution, dtype)


def fill_portable(
    local: torch.Tensor, distribution: Distribution, layout: ShardLayout, key: int | torch.Tensor
) -> None:
    """Fill `local` with its part of the tensor that `key` makes.

    Args:
        local: without a graph; its strides are those that the layout was checked against.
        distribution: what to draw.
        layout: which elements `local` holds.
        key: an int on CPU, else a tensor on the device of `local`; see `draw_key`.
    """
    kind = map_of(distribution, local.dtype)
    if isinstance(key, torch.Tensor) and kind.fused is not None and _has_kernels(key.device):
        # Not before there is something to launch: triton takes long to import.
        from vescale_rng._portable import launch

        launch.launch_fill(local, kind, kind.fused, layout, key)
        return
    fill_by_arrays(local, kind, layout, key)


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def fill_by_arrays(
    local: torch.Tensor, kind: Map, layout: ShardLayout, key: int | torch.Tensor
) -> None:
    """Fill without Triton, on any device: by numpy where the key is a number, else by torch."""
    arrays, blocks = arrays_of(key)
    for part in parts(layout, kind, blocks):
        made = part.of(arrays, kind.of(arrays, part.words(arrays, key)))
        values = torch.as_tensor(made, device=local.device)
        store(local, part.tile, values, kind)


def arrays_of(key: int | torch.Tensor) -> tuple[Arrays, int]:
    """Return the arrays that serve a key, and the blocks that are computed at once."""
    if isinstance(key, int):
        return NumpyArrays(), _CPU_BLOCKS
    return TorchArrays(key.device), _DEVICE_BLOCKS


def minus_log_(values: torch.Tensor) -> torch.Tensor:
    """Replace positive values by their negative logarithms: the same bits on every device."""
    kind = DOUBLE if values.dtype == torch.float64 else SINGLE
    # float16's smallest are normal numbers of float32, where the logarithm is computed.
    given = values.to(torch.float64 if kind is DOUBLE else torch.float32).contiguous()
    if given.device.type == "cpu":
        return values.copy_(torch.from_numpy(minus_log(NumpyArrays(), kind, given.numpy())))
    return values.copy_(minus_log(TorchArrays(given.device), kind, given))


@dataclass(frozen=True)
class TileBlocks:
    """A tile, and the blocks that its elements are made from.

    Attributes:
        tile: the elements.
        per_block: elements that a block makes.
        run_blocks: blocks that cover a run, wherever in a block it begins.
        phases: where in their blocks the runs begin; None when that differs over runs.
    """

    tile: Tile
    per_block: int
    run_blocks: int
    phases: int | None

    def words(self, arrays: Arrays, key: Any, stream: int = 0) -> Any:
        """Return the words of all blocks of all runs."""
        shifted = tuple(stride // self.per_block for stride in self.tile.strides[:-1])
        # Runs that all begin at one phase of a block share a grid of blocks.
        if self.phases is not None:
            sizes = (*self.tile.sizes[:-1], self.run_blocks)
            blocks = arrays.blocks(self.tile.start // self.per_block, sizes, (*shifted, 1))
        else:
            starts = self.starts(arrays) // self.per_block
            blocks = starts[..., None] + arrays.blocks(0, (self.run_blocks,), (1,))
        return self.words_of_blocks(arrays, key, blocks.reshape(-1), stream)

    def words_of_blocks(self, arrays: Arrays, key: Any, blocks: Any, stream: int) -> Any:
        """Return the words of these blocks."""
        if self.per_block == 2:
            return arrays.wide_words(key, blocks, stream)
        return arrays.words(key, blocks, stream)

    def starts(self, arrays: Arrays) -> Any:
        """Return the place in global memory at which each run begins."""
        return arrays.blocks(self.tile.start, self.tile.sizes[:-1], self.tile.strides[:-1])

    def places(self, arrays: Arrays) -> Any:
        """Return the place in global memory of each element, in one dim."""
        return arrays.blocks(self.tile.start, self.tile.sizes, self.tile.strides).reshape(-1)

    def of(self, arrays: Arrays, values: Any) -> Any:
        """Return the tile's elements, in its shape, out of what its blocks make."""
        length = self.tile.sizes[-1]
        # What the blocks made besides, before a run begins and after it ends, belongs to other
        # ranks or to other tiles.
        runs = arrays.in_order(values).reshape(*self.tile.sizes[:-1], -1)
        if self.phases is not None:
            return runs[..., self.phases : self.phases + length]
        phases = (self.starts(arrays) % self.per_block).reshape(-1, 1)
        width = runs.shape[-1]
        rows = arrays.blocks(0, (phases.shape[0], 1), (width, 1))
        places = rows + phases + arrays.blocks(0, (length,), (1,))
        return runs.reshape(-1)[places].reshape(self.tile.sizes)


def parts(layout: ShardLayout, kind: Map, blocks: int) -> Iterator[TileBlocks]:
    """Yield the layout's tiles, of at most about so many blocks each."""
    per_block = 2 if kind.wide else 4
    for whole in tiles_of(layout):
        # A short run takes more blocks than its elements need: fewer of them at once.
        run = whole.sizes[-1]
        waste = (run + 2 * per_block - 2) // per_block * per_block / run
        most = max(per_block, int(blocks * per_block / min(waste, per_block)))
        for tile in cut_tile(whole, most // per_block * per_block, per_block):
            yield _part(tile, per_block)


def _part(tile: Tile, per_block: int) -> TileBlocks:
    length = tile.sizes[-1]
    if all(stride % per_block == 0 for stride in tile.strides[:-1]):
        phase = tile.start % per_block
        return TileBlocks(tile, per_block, (phase + length + per_block - 1) // per_block, phase)
    return TileBlocks(tile, per_block, (length + 2 * per_block - 2) // per_block, None)


def store(local: torch.Tensor, tile: Tile, values: torch.Tensor, kind: Map) -> None:
    """Copy a tile's values into the local tensor, rounded to its dtype."""
    if kind.excluded is not None:
        high, low = kind.rounded(local.dtype)
        values = values.to(local.dtype)
        values = torch.where(values == high, low, values)
    tile.of(local).copy_(values)
