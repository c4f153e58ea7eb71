"""Random factories that `torch.distributed.tensor` does not have: `normal` and `randperm`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import vescale_rng
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._api.factories import Placements, born, drawn
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.rng_layout import random_layout
from vescale_dtensor._tensor.dtensor import DTensor


def normal(
    mean: float,
    std: float,
    size: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return normal numbers: those of `torch.normal(mean, std, size)` on one device; see `empty`.

    Where the mean or the deviation is a tensor, `torch.normal` itself takes DTensors.
    """
    make = drawn(vescale_rng.Normal(mean, std), dtype, generator)
    return born(
        "normal",
        tuple(size),
        make,
        device_mesh,
        placements,
        layout=layout,
        requires_grad=requires_grad,
        numbers=(mean, std),
    )


def randperm(
    n: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.int64,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
) -> DTensor:
    """Return the permutation of 0 to n - 1 that `torch.randperm` draws on one device; see `empty`.

    Every rank draws all of it and keeps its shard, since each element depends on those before.
    """

    def make(rng_layout: Layout, shape: Shape, device: torch.device) -> Tensor:
        # Only its strides are read, so it needs no memory.
        local = torch.empty(local_shape(rng_layout, shape), dtype=dtype, device="meta")
        mine = random_layout(rng_layout, shape, local, generator)
        return vescale_rng.randperm(n, mine, dtype=dtype, generator=generator).to(device)

    return born(
        "randperm",
        (n,),
        make,
        device_mesh,
        placements,
        layout=layout,
        requires_grad=requires_grad,
    )
