"""Layouts in the form that vescale_rng takes, one object per layout and shape."""

from __future__ import annotations

import torch
import vescale_rng
from torch import Tensor

from vescale_dtensor._layout.execution_events import record_draw
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.protocol import describe_owned
from vescale_dtensor._layout.spec import Spec
from vescale_dtensor._torch.worlds import cached


def random_layout(
    layout: Layout, shape: Shape, local: Tensor, generator: torch.Generator | None = None
) -> vescale_rng.ShardLayout:
    """Return the layout by which this rank draws its shard of a tensor of global `shape`.

    Args:
        layout: layout of the tensor.
        shape: global shape.
        local: the local tensor to draw into; its strides tell where each element is stored.
        generator: what is drawn from; None is the default one of the device.

    The ranks' generators are compared at some of the draws: see `execution_events`.

    Raises:
        CommMismatchError: the ranks' generators differ.
        UnsupportedError: the tensor is partial, so that it has no elements to draw.
    """
    record_draw(layout.mesh, local, generator)
    return _random_layout(layout, tuple(shape), local.stride())


@cached(1024)
def rng_layout_of(spec: Spec, strides: Shape) -> vescale_rng.ShardLayout:
    """Return `random_layout` for a tensor of this spec whose local tensor has these strides."""
    return _random_layout(spec.layout, tuple(spec.shape), strides)


# Shared by both functions: vescale_rng keeps its plans on the layout object, so another equal
# object would plan again.
@cached(1024)
def _random_layout(layout: Layout, shape: Shape, strides: Shape) -> vescale_rng.ShardLayout:
    return vescale_rng.as_layout(describe_owned(layout, shape, strides))
