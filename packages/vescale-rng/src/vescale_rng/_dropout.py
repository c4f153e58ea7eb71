"""Dropout of a piece of a tensor, with the mask that one device would have drawn."""

import torch
from torch.nn import functional

from vescale_rng._devices import check_device, cpu_generator
from vescale_rng._distributions import Bernoulli
from vescale_rng._errors import DistributionError
from vescale_rng._fill import fill_
from vescale_rng._layout import Box, Layout, LayoutLike, as_layout


def dropout(
    local: torch.Tensor,
    p: float,
    layout: LayoutLike,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.dropout(x, p, training=True)` of the whole, for this rank's part of x.

    Forward and backward give the bits that one device gives, and ``generator`` ends where one
    device leaves it, on every rank. Differentiable any number of times.

    Args:
        local: this rank's elements, on CPU, floating point.
        p: probability of an element to be zeroed.
        layout: which elements of the global tensor ``local`` holds.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: the layout contradicts itself or does not cover ``local``.
        DistributionError: p is no probability, or the dtype is not floating point.
        DeviceError: the tensor or the generator is not on CPU.
    """
    if not 0 <= p <= 1:
        raise DistributionError(f"dropout takes a probability between 0 and 1, got p={p}")
    if not local.is_floating_point():
        raise DistributionError(f"dropout takes a floating point tensor, got {local.dtype}")
    check_device(local)
    generator = cpu_generator(generator)
    layout = as_layout(layout)
    # p = 1 is a product with a zero in torch (NaN stays NaN), so it is asked as well.
    if p in (0, 1) or 0 in layout.global_shape:
        # torch draws nothing here: what it does is the same for a piece as for the whole.
        return functional.dropout(local, p, training=True)
    # The same torch ops as in ATen/native/Dropout.cpp, so the same bits.
    noise, layout = _like(local, layout)
    fill_(noise, Bernoulli(1 - p), layout, generator)
    return local * noise.div_(1 - p)


def _like(local: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    """An empty tensor on which the boxes of ``layout`` lie as on ``local``, and how they do."""
    if _is_box(local, layout):
        # The usual case: free to choose the strides, which for an expanded local one must.
        noise = torch.empty_like(local, requires_grad=False)
        box = layout.boxes[0]
        box = Box(box.global_offset, box.shape, 0, noise.stride())
        return noise, Layout(layout.global_shape, (box,), memory_order=layout.memory_order)
    return torch.empty_strided(local.shape, local.stride(), dtype=local.dtype), layout


def _is_box(local: torch.Tensor, layout: Layout) -> bool:
    """Whether the local tensor, index for index, is the one box of its layout."""
    if len(layout.boxes) != 1 or layout.boxes[0].shape != local.shape:
        return False
    box = layout.boxes[0]
    sides = zip(box.shape, box.local_strides, local.stride(), strict=True)
    return box.local_offset == 0 and all(a == b for n, a, b in sides if n > 1)
