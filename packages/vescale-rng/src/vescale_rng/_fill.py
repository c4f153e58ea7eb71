"""Fill a piece of a tensor with the numbers that one device would have put there."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import prod

import torch

from vescale_rng._adapters import layout_of_tensor, local_of
from vescale_rng._check import check_global, check_local
from vescale_rng._consumption import Consumption, consumption_of
from vescale_rng._devices import check_device, cpu_generator
from vescale_rng._distributions import Distribution
from vescale_rng._layout import Ints, Layout, LayoutLike, as_layout, dense_strides, is_row_major
from vescale_rng._samplers import Op, sampler_of
from vescale_rng._sweep import Sweep, Window, sweep_of

# A sweep of so few windows is kept whole with its plan.
_FEW = 16


@dataclass(frozen=True)
class Plan:
    """What a fill does for one layout on local tensors of one shape and strides.

    Attributes:
        layout: the layout, checked.
        numel: elements of the global tensor.
        contiguous: whether the global tensor is row-major, as torch sees it.
        whole: whether the local tensor is the global one, element for element in memory: torch
            then fills it as one device does.
        sweep: the windows, otherwise.
        windows: the windows of the sweep, where they are few.
        longest: elements of the longest window.
    """

    layout: Layout
    numel: int
    contiguous: bool
    whole: bool
    sweep: Sweep
    windows: tuple[Window, ...] | None
    longest: int


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
    plan = plan_of(as_layout(layout), tuple(target.shape), target.stride())
    consumption = consumption_of(distribution, target.dtype, plan.numel, plan.contiguous)
    if target.requires_grad and torch.is_grad_enabled():
        # As with torch's own random methods: a leaf is refused, and no gradient passes.
        target.zero_()
    if plan.numel:
        run(
            plan,
            consumption,
            Op(distribution, plan.numel, target.dtype, generator),
            target.detach(),
        )
    return local


@lru_cache(maxsize=4096)
def plan_of(layout: Layout, shape: Ints, strides: Ints) -> Plan:
    """Check a layout against a local tensor's shape and strides, and plan its fills."""
    check_global(layout)
    check_local(layout, shape, strides)
    sweep = sweep_of(layout)
    windows = tuple(islice(sweep.windows(), _FEW + 1))
    few = len(windows) <= _FEW
    longest = max((window.stop - window.start for window in windows), default=0)
    return Plan(
        layout=layout,
        numel=prod(layout.global_shape),
        contiguous=is_row_major(layout.global_shape, layout.memory_order),
        whole=_is_whole(layout),
        sweep=sweep,
        windows=windows if few else None,
        longest=longest if few else sweep.longest,
    )


def run(plan: Plan, consumption: Consumption, op: Op, local: torch.Tensor) -> None:
    """Draw ``op`` into ``local``, and leave its generator behind the whole of it."""
    offset = local.storage_offset()
    if plan.whole:
        box = plan.layout.boxes[0]
        view = local.as_strided(box.shape, box.local_strides, offset + box.local_offset)
        op.distribution.draw(view, op.generator)
        return
    sampler = sampler_of(op, consumption, plan.longest)
    for window in plan.sweep.windows() if plan.windows is None else plan.windows:
        values = sampler.take(window.start, window.stop)
        for piece in window.pieces:
            place = values.storage_offset() + piece.start - window.start
            drawn = values.as_strided(piece.shape, piece.strides, place)
            place = offset + piece.local_offset
            local.as_strided(piece.shape, piece.local_strides, place).copy_(drawn)
    sampler.finish()


def _is_whole(layout: Layout) -> bool:
    """Whether one box holds everything, with the strides of the tensor on one device."""
    if len(layout.boxes) != 1 or layout.boxes[0].shape != layout.global_shape:
        return False
    dense = dense_strides(layout.global_shape, layout.memory_order)
    sides = zip(layout.global_shape, layout.boxes[0].local_strides, dense, strict=True)
    return all(stride == expected for size, stride, expected in sides if size > 1)
