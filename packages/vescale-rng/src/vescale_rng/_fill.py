"""Fill a piece of a tensor with the numbers that one device would have put there."""

import torch

from vescale_rng import _native_cpu
from vescale_rng._adapters import layout_of_tensor, local_of
from vescale_rng._consumption import consumption_of
from vescale_rng._devices import check_device, cpu_generator
from vescale_rng._distributions import Distribution
from vescale_rng._layout import LayoutLike, as_layout
from vescale_rng._plan import plan_of
from vescale_rng._samplers import Op


def fill_(
    local: torch.Tensor,
    distribution: Distribution,
    layout: LayoutLike | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Fill ``local`` with its part of what ``distribution`` puts into the whole tensor.

    The numbers are those that the torch method of that name writes into one tensor of the
    global shape, and ``generator`` ends where that call leaves it, on every rank, also where the
    local part is empty. Nothing is communicated, and no scratch grows with the global size.

    Args:
        local: this rank's elements, on CPU; any strides that the layout describes.
        distribution: what to draw.
        layout: which elements of the global tensor ``local`` holds; None asks ``local`` itself
            (an object with `__vescale_layout__`, torch's `DTensor`, or a whole plain tensor).
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Returns:
        ``local``.

    Raises:
        LayoutError: the layout contradicts itself or does not cover ``local``.
        DistributionError: torch does not draw this distribution for this dtype.
        DeviceError: the tensor or the generator is not on CPU.
    """
    if layout is None:
        layout = layout_of_tensor(local)
    target = local_of(local)
    check_device(target)
    generator = cpu_generator(generator)
    # All refusals come before the first draw: an error leaves the generator where it was.
    plan = plan_of(as_layout(layout), tuple(target.shape), target.stride())
    consumption = consumption_of(distribution, target.dtype, plan.numel, plan.contiguous)
    if target.requires_grad and torch.is_grad_enabled():
        # As with torch's own random methods: a leaf is refused, and no gradient passes.
        target.zero_()
    # The same data and the same version counter, without a graph: autograd still sees the write.
    target = target.detach()
    if plan.numel:
        op = Op(distribution, plan.numel, target.dtype, generator)
        _native_cpu.run(plan, consumption, op, target)
    return local
