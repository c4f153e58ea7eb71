"""Shards of a drawn tensor beside the whole: layouts, their parts, and what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from tools.first_gpu.paths import of_tests

_pieces = of_tests("rng", "rng_pieces")
FLOATS: Final[tuple[torch.dtype, ...]] = _pieces.FLOATS
Shard: Final = _pieces.Shard
strided: Final = _pieces.strided
parts: Final = _pieces.boxes_of
"""Each box of a rank: where it is in the whole, and the rank's view of it."""


@dataclass(frozen=True)
class Split:
    """How a tensor is laid out over ranks.

    Attributes:
        name: of the layout.
        shape: of the tensor; -1 stands for as many elements as several turns of a device take.
        dims: that the axes of the mesh shard.
        mesh: its sizes.
        order: of memory, outermost dim first; None: row-major.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    mesh: tuple[int, ...]
    order: tuple[int, ...] | None = None

    def ranks(self) -> Iterator[tuple[int, ...]]:
        """Coordinates of all ranks."""
        yield from product(*map(range, self.mesh))

    def layout(self, coordinate: Sequence[int], shape: tuple[int, ...]) -> Any:
        """What a rank holds."""
        from vescale_rng import layout_of

        placements = [Shard(dim) for dim in self.dims]
        how = {} if self.order is None else {"memory_order": self.order}
        return layout_of(shape, placements, self.mesh, tuple(coordinate), **how)

    def whole(self, shape: tuple[int, ...]) -> Any:
        """The layout of all of it on one rank, in the same order of memory."""
        from vescale_rng import layout_of

        how = {} if self.order is None else {"memory_order": self.order}
        return layout_of(shape, [Shard(0)], (1,), (0,), **how)


SPLITS: Final = (
    Split("rows over 3", (-1,), (0,), (3,)),
    Split("columns over 2", (61, 517), (1,), (2,)),
    Split("both over 3 x 2", (401, 103), (0, 1), (3, 2)),
    Split("transposed, both over 2 x 2", (401, 103), (0, 1), (2, 2), (1, 0)),
    Split("three dims over 8", (7, 41, 33), (0,), (8,), (2, 0, 1)),
)
"""The first reaches across the boundaries of a device's map; the last leaves a rank empty."""


def many(device: torch.device) -> int:
    """Elements that take several turns of all threads, and end in the middle of one."""
    from vescale_rng.cuda import threads_of

    return 9 * threads_of(device) + 777 if device.type == "cuda" else 3001


def distributions() -> list[tuple[Any, torch.dtype]]:
    """What is drawn: float32 of each first, as that tells most."""
    return [*dict.fromkeys(of_tests("rng", "cuda_table").KINDS)]


def short(dtype: torch.dtype) -> str:
    """The name of a dtype."""
    return str(dtype).removeprefix("torch.")


Draw = Callable[[Tensor, Any, torch.Generator], None]
"""Draws into a rank's tensor of a layout."""


def shards_beside(
    whole: Tensor, split: Split, draw: Draw, seeded: Callable[[], torch.Generator]
) -> tuple[dict[str, tuple[Tensor, Tensor]], list[Tensor]]:
    """Pairs of each rank's parts, and where its generator ends."""
    pairs, ends = {}, []
    for coordinate in split.ranks():
        layout = split.layout(coordinate, tuple(whole.shape))
        local = strided(layout.local_shape, split.order, whole.dtype, whole.device)
        generator = seeded()
        draw(local, layout, generator)
        ends.append(generator.get_state())
        for at, view in parts(local, layout):
            name = f"{split.name}, rank {tuple(coordinate)}, from {[one.start for one in at]}"
            pairs[name] = (whole[at], view)
    return pairs, ends
