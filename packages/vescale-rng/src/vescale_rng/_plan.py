"""From a layout and a local tensor's geometry to what a fill does: checked once, then kept."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import prod

from vescale_rng._check import check_global, check_local
from vescale_rng._layout import Ints, Layout, dense_strides, is_row_major
from vescale_rng._sweep import Sweep, Window, sweep_of

# A sweep of so few windows is kept with its plan; longer ones are made anew, window by window.
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


def _is_whole(layout: Layout) -> bool:
    """Whether one box holds everything, with the strides of the tensor on one device."""
    if len(layout.boxes) != 1 or layout.boxes[0].shape != layout.global_shape:
        return False
    dense = dense_strides(layout.global_shape, layout.memory_order)
    sides = zip(layout.global_shape, layout.boxes[0].local_strides, dense, strict=True)
    return all(stride == expected for size, stride, expected in sides if size > 1)
