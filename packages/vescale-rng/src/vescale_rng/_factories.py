"""New local tensors: `torch.rand` and its like for one rank's part of a tensor."""

import torch

from vescale_rng._distributions import Distribution, Normal, RandInt, Uniform
from vescale_rng._errors import LayoutError
from vescale_rng._fill import fill_
from vescale_rng._layout import LayoutLike, as_layout, dense_strides


def rand(
    layout: LayoutLike,
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """This rank's part of `torch.rand`: uniform in [0, 1).

    Args:
        layout: which elements; it must know its ``local_shape``, as those of `layout_of` do.
        dtype: a floating point dtype; None is torch's default.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not know its local shape.
    """
    return _new(Uniform(), layout, dtype, generator)


def randn(
    layout: LayoutLike,
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """This rank's part of `torch.randn`: the standard normal distribution.

    Args:
        layout: which elements; it must know its ``local_shape``, as those of `layout_of` do.
        dtype: a floating point dtype; None is torch's default.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not know its local shape.
    """
    return _new(Normal(), layout, dtype, generator)


def randint(
    low: int,
    high: int,
    layout: LayoutLike,
    *,
    dtype: torch.dtype = torch.int64,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """This rank's part of `torch.randint`: integers in [low, high).

    Args:
        low: the least of them.
        high: one more than the greatest.
        layout: which elements; it must know its ``local_shape``, as those of `layout_of` do.
        dtype: of the result.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not know its local shape.
        DistributionError: the range is empty, or too large for the dtype.
    """
    return _new(RandInt(low, high), layout, dtype, generator)


def _new(
    distribution: Distribution,
    layout: LayoutLike,
    dtype: torch.dtype | None,
    generator: torch.Generator | None,
) -> torch.Tensor:
    layout = as_layout(layout)
    shape = layout.local_shape
    if shape is None:
        raise LayoutError(
            f"the layout of global shape {layout.global_shape} does not say its local_shape, so "
            "there is no tensor to make: make one yourself and use fill_"
        )
    strides = dense_strides(shape, layout.memory_order)
    local = torch.empty_strided(shape, strides, dtype=dtype)
    return fill_(local, distribution, layout, generator)
