"""Fill a shard of a tensor with the numbers that one device would have drawn there."""

from math import sqrt

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from vescale_rng import _portable as portable
from vescale_rng._arguments import checked
from vescale_rng._cpu.fill import fill_cpu
from vescale_rng._cuda.fill import fill_cuda
from vescale_rng._cuda.generator_state import GraphGenerator
from vescale_rng._distributions import Distribution, Normal
from vescale_rng._draw.devices import (
    check_device,
    cpu_generator,
    cuda_generator,
    is_cuda,
    torch_generator,
)
from vescale_rng._errors import DistributionError
from vescale_rng._layout.fill_plan import plan_for
from vescale_rng._layout.layout import LayoutLike, ShardLayout, as_layout
from vescale_rng._layout.of_tensor import layout_of_tensor, local_of
from vescale_rng._layout.real_layout import real_layout_of
from vescale_rng._policy import policy


@checked()
def fill_(
    local: torch.Tensor,
    distribution: Distribution,
    layout: LayoutLike | None = None,
    generator: torch.Generator | GraphGenerator | None = None,
) -> torch.Tensor:
    """Fill `local` with its part of what `distribution` draws for the global tensor.

    The numbers are those that the torch method of that name writes into one tensor of the
    global shape, and `generator` ends where that call leaves it, on every rank, also where the
    local part is empty. Nothing is communicated, and no scratch grows with the global size.

    Args:
        local: this rank's elements, on CPU or CUDA; any strides that the layout describes. Also a
            numpy array, or any object with `__dlpack__`, whose memory is filled.
        distribution: what to draw.
        layout: which elements of the global tensor `local` holds; None asks `local` itself
            (an object with `__vescale_layout__`, torch's `DTensor`, or a global tensor).
            A `ShardLayout` that is kept and passed again is not checked again.
        generator: of the device of `local`, in the same state on every rank; None is torch's
            default. On CUDA also a `GraphGenerator`, which CUDA graphs can capture.

    Returns:
        `local`.

    Raises:
        LayoutError: the layout contradicts itself or does not cover `local`.
        DistributionError: torch does not draw this distribution for this dtype.
        DeviceError: the generator is of another device, or this device draws by a map that is not
            known.
    """
    if has_torch_function_unary(None):  # asked of no tensor: only a torch function mode answers
        # It sees a fill as one function, as it sees torch's own, and not the draws within.
        filled: torch.Tensor = handle_torch_function(
            fill_, (), local, distribution, layout, generator
        )
        return filled
    if not isinstance(distribution, Distribution):
        raise DistributionError(
            f"`distribution`: a value such as Normal() or Uniform(0, 1): got {distribution!r:.80}"
        )
    if layout is None:
        layout = layout_of_tensor(local)
    target = local if type(local) is torch.Tensor else local_of(local)
    if target.is_complex() and isinstance(distribution, Normal):
        _fill_complex(target, distribution, as_layout(layout), generator)
        return local
    if is_cuda(target):
        generator = cuda_generator(target, generator)
        plan = plan_for(as_layout(layout), target)
        fill_cuda(plan, distribution, write_target(target), generator)
        return local
    if policy() == "portable":
        own = torch_generator(generator)
        return _fill_portably(local, distribution, as_layout(layout), own)
    check_device(target)
    generator = cpu_generator(generator)
    # A layout that is kept and passed again goes straight to its plan.
    plan = plan_for(layout if type(layout) is ShardLayout else as_layout(layout), target)
    fill_cpu(plan, distribution, write_target(target), generator)
    return local


def _fill_complex(
    target: torch.Tensor,
    normal: Normal,
    layout: ShardLayout,
    generator: torch.Generator | GraphGenerator | None,
) -> None:
    """Fill with complex normals as torch does: both parts with the mean and half the variance."""
    plan_for(layout, target)  # refuses what does not fit, before anything is drawn
    parts = Normal(normal.mean, float(normal.std) / sqrt(2.0))
    fill_(torch.view_as_real(write_target(target)), parts, real_layout_of(layout), generator)


def _fill_portably(
    local: torch.Tensor,
    distribution: Distribution,
    layout: ShardLayout,
    generator: torch.Generator | None,
) -> torch.Tensor:
    target = local_of(local)
    # A layout that does not fit is refused before the generator is touched.
    plan = plan_for(layout, target)
    portable.check(distribution, target.dtype)
    if plan.numel:
        # By the global size, not by the local: a rank without elements takes the key like the
        # others, or its generator would fall behind theirs.
        key = portable.draw_key(generator, target.device)
        portable.fill_portable(write_target(target), distribution, plan.layout, key)
    return local


def write_target(target: torch.Tensor) -> torch.Tensor:
    """Return the tensor to draw into, so that autograd sees a write and no gradient passes it."""
    if not target.requires_grad:
        return target
    if torch.is_grad_enabled():
        # As with torch's own random methods: a leaf is refused.
        target.zero_()
    # The same data and the same version counter, without a graph.
    return target.detach()
