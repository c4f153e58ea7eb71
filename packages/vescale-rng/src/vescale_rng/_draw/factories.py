"""New local tensors: `torch.rand` and its like for one rank's part of a tensor."""

import torch

from vescale_rng import _portable as portable
from vescale_rng._arguments import checked
from vescale_rng._distributions import Distribution, Exponential, Normal, RandInt, Uniform
from vescale_rng._draw.fill import fill_
from vescale_rng._errors import LayoutError
from vescale_rng._layout.fill_plan import plan_for
from vescale_rng._layout.layout import LayoutLike, as_layout, dense_strides
from vescale_rng._layout.local_like import make_like
from vescale_rng._layout.of_tensor import layout_of_tensor, local_of
from vescale_rng._policy import policy


@checked()
def rand(
    layout: LayoutLike,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw this rank's part of `torch.rand`: uniform in [0, 1).

    Args:
        layout: which elements; it must know its `local_shape`, as those of `layout_of` do.
        dtype: a floating point dtype; None is torch's default.
        device: of the result; None is torch's default.
        generator: of that device, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not know its local shape.
    """
    return _new(Uniform(), layout, (dtype, device), generator)


@checked()
def randn(
    layout: LayoutLike,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw this rank's part of `torch.randn`: the standard normal distribution.

    Args:
        layout: which elements; it must know its `local_shape`, as those of `layout_of` do.
        dtype: a floating point dtype; None is torch's default.
        device: of the result; None is torch's default.
        generator: of that device, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not know its local shape.
    """
    return _new(Normal(), layout, (dtype, device), generator)


@checked()
def randint(
    low: int,
    high: int,
    layout: LayoutLike,
    *,
    dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw this rank's part of `torch.randint`: integers in [low, high).

    Args:
        low: the least of them.
        high: one more than the greatest.
        layout: which elements; it must know its `local_shape`, as those of `layout_of` do.
        dtype: of the result.
        device: of the result; None is torch's default.
        generator: of that device, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not know its local shape.
        DistributionError: the range is empty, or too large for the dtype.
    """
    return _new(RandInt(low, high), layout, (dtype, device), generator)


@checked()
def rand_like(
    local: torch.Tensor,
    layout: LayoutLike | None = None,
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw this rank's part of `torch.rand_like`, which keeps the memory order.

    Args:
        local: this rank's part of the tensor that the new one is like.
        layout: which elements it holds; None asks `local` itself.
        dtype: a floating point dtype; None is that of `local`.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not cover `local`.
        DistributionError: the dtype is not floating point.
    """
    return _new_like(Uniform(), local, layout, dtype, generator)


@checked()
def randn_like(
    local: torch.Tensor,
    layout: LayoutLike | None = None,
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw this rank's part of `torch.randn_like`: see `rand_like`."""
    return _new_like(Normal(), local, layout, dtype, generator)


@checked()
def randint_like(
    local: torch.Tensor,
    low: int,
    high: int,
    layout: LayoutLike | None = None,
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw this rank's part of `torch.randint_like`, integers in [low, high): see `rand_like`."""
    return _new_like(RandInt(low, high), local, layout, dtype, generator)


@checked()
def gumbel_like(
    local: torch.Tensor,
    layout: LayoutLike | None = None,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw this rank's part of the noise that `F.gumbel_softmax` adds to its logits; row-major.

    Args:
        local: this rank's part of the logits.
        layout: which elements it holds; None asks `local` itself.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not cover `local`.
        DistributionError: the dtype is not floating point.
    """
    held = as_layout(layout_of_tensor(local) if layout is None else layout)
    source = local_of(local)
    # Checked against the given tensor: the new one is made to fit, and would always do.
    plan_for(held, source)
    noise, where = make_like(source, held, row_major=True)
    fill_(noise, Exponential(), where, generator)
    # The portable policy calls no library's logarithm.
    return portable.minus_log_(noise) if policy() == "portable" else -noise.log()


def _new_like(
    distribution: Distribution,
    local: torch.Tensor,
    layout: LayoutLike | None,
    dtype: torch.dtype | None,
    generator: torch.Generator | None,
) -> torch.Tensor:
    held = as_layout(layout_of_tensor(local) if layout is None else layout)
    source = local_of(local)
    # As in `gumbel_like`: the new tensor would fit any layout.
    plan_for(held, source)
    new, where = make_like(source, held, dtype)
    return fill_(new, distribution, where, generator)


def _new(
    distribution: Distribution,
    layout: LayoutLike,
    kind: tuple[torch.dtype | None, torch.device | str | None],
    generator: torch.Generator | None,
) -> torch.Tensor:
    layout = as_layout(layout)
    shape = layout.local_shape
    if shape is None:
        raise LayoutError(
            f"the layout of global shape {layout.global_shape} does not say its local_shape, so "
            "there is no tensor to make: make one yourself and use fill_"
        )
    # Without gaps, in the order of the global tensor, as `layout_of` orders its boxes.
    strides = dense_strides(shape, layout.memory_order)
    dtype, device = kind
    # Not zeroed: every element is drawn, and a layout that leaves some out is refused by its boxes.
    local = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return fill_(local, distribution, layout, generator)
