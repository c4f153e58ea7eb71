"""The native policy on CPU: torch draws every number, from its own stream moved into place."""

import torch

from vescale_rng._cpu.draw_order import (
    BLOCK,
    Blocks,
    DrawOrder,
    Elements,
    Pairs,
    draw_order_of,
)
from vescale_rng._cpu.samplers import BlockSampler, SerialOp, sampler_of
from vescale_rng._cpu.stream import advance
from vescale_rng._distributions import Distribution
from vescale_rng._layout.fill_plan import FillPlan
from vescale_rng._layout.window_plan import Window


def fill_cpu(
    plan: FillPlan, distribution: Distribution, local: torch.Tensor, generator: torch.Generator
) -> None:
    """Draw into `local`, and leave `generator` where the global op leaves it.

    Raises:
        DistributionError: torch does not draw this distribution for this dtype; nothing is drawn.
    """
    # All refusals come before the first draw: an error leaves the generator where it was.
    draw_order = draw_order_of(distribution, local.dtype, plan.numel, plan.contiguous)
    if not plan.numel:
        return
    if plan.whole:
        # One device's own call, on a tensor of one device's own strides.
        distribution.draw(_as_box(plan, local), generator)
    elif plan.span is not None and (ways := _ways(plan.span, draw_order, plan.numel)) is not None:
        # The one draw in place: words of other ranks before and after it are passed by.
        before, after = ways
        advance(before, generator)
        if plan.span[0] < plan.span[1]:
            distribution.draw(_in_order(local), generator)
        advance(after, generator)
    else:
        op = SerialOp(distribution, plan.numel, local.dtype, generator)
        # A contiguous shard whose ends are inside blocks of 16 still draws the rest in place.
        if plan.span is not None and isinstance(draw_order, Blocks):
            _fill_blocks(plan.span, draw_order, op, local)
        else:
            _fill_windows(plan, draw_order, op, local)


def ways_around(
    plan: FillPlan, distribution: Distribution, local: torch.Tensor
) -> tuple[int, int] | None:
    """Return the words that `fill_cpu` passes before and after a draw that fills `local` itself.

    None where it draws otherwise, or into a view of `local`, or nothing.
    """
    if plan.whole:
        return (0, 0) if plan.numel and _as_box(plan, local) is local else None
    if not plan.span or plan.span[0] == plan.span[1] or _in_order(local) is not local:
        return None
    draw_order = draw_order_of(distribution, local.dtype, plan.numel, plan.contiguous)
    return _ways(plan.span, draw_order, plan.numel)


def fill_with_parameter(
    plan: FillPlan, op: SerialOp, words: int, parameter: "Parameter", local: torch.Tensor
) -> None:
    """Draw into `local` an op that reads `parameter` and takes `words` for each element."""
    sampler = sampler_of(op, Elements(words), plan.longest)
    for window in plan.windows():
        parameter.load(window)
        store(window, sampler.take(window.start, window.stop), local)
    sampler.finish()


class Parameter:
    """A tensor of parameters that is sharded like the tensor to be drawn, window by window.

    Args:
        values: one for every local element, with the local tensor's own strides.
        longest: elements of the longest window.
        filler: a parameter that torch accepts, for elements of other ranks.
    """

    def __init__(self, values: torch.Tensor, longest: int, filler: float) -> None:
        self._values = values
        self._filler = filler
        self._scratch = torch.empty(longest, dtype=values.dtype, device=values.device)

    def load(self, window: Window) -> None:
        """Copy the parameters of the local elements in a window to their places in it."""
        # Elements of other ranks are drawn as well, and dropped: any legal parameter will do.
        here = self._scratch[: window.stop - window.start].fill_(self._filler)
        for inside, mine in _views(window, here, self._values):
            inside.copy_(mine)

    def of(self, count: int) -> torch.Tensor:
        """Return the parameters of the first `count` elements of the window."""
        return self._scratch[:count]


def _fill_windows(plan: FillPlan, draw_order: DrawOrder, op: SerialOp, local: torch.Tensor) -> None:
    sampler = sampler_of(op, draw_order, plan.longest)
    for window in plan.windows():
        store(window, sampler.take(window.start, window.stop), local)
    # Also where there was no window: a rank that holds nothing moves as far as the others.
    sampler.finish()


def store(window: Window, values: torch.Tensor, local: torch.Tensor) -> None:
    """Copy the local elements of a window out of its values."""
    for inside, mine in _views(window, values, local):
        mine.copy_(inside)


def _views(
    window: Window, values: torch.Tensor, local: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the elements of each run, in the window and in the local tensor."""
    # Offsets of runs count from the start of memory; the views' own offsets are added here.
    there, here = values.storage_offset() - window.start, local.storage_offset()
    return [
        (
            values.as_strided(piece.shape, piece.strides, there + piece.start),
            local.as_strided(piece.shape, piece.local_strides, here + piece.local_offset),
        )
        for piece in window.pieces
    ]


def _ways(span: tuple[int, int], draw_order: DrawOrder, numel: int) -> tuple[int, int] | None:
    """Return the words before and after a range that takes those in its place, and no others."""
    start, stop = span
    # Where pairs begin depends on a cached normal: only a sampler can know.
    if isinstance(draw_order, Pairs):
        return None
    if isinstance(draw_order, Blocks):
        regular = numel - BLOCK if numel % BLOCK else numel
        # Incomplete blocks, and the last 16 that are drawn anew, use words of neighbours.
        if start % BLOCK or stop % BLOCK or stop > regular:
            return None
    total = draw_order.total(numel, cached=False)
    return start * draw_order.words, total - stop * draw_order.words


def _fill_blocks(
    span: tuple[int, int], draw_order: Blocks, op: SerialOp, local: torch.Tensor
) -> None:
    """Draw complete blocks in place; the rest at both ends goes through scratch."""
    start, stop = span
    # Room for both ends: less than a block before the first boundary, and less than two after the
    # last one, the 16 that are drawn anew included.
    sampler = BlockSampler(op, draw_order, 4 * BLOCK)
    out = _in_order(local).reshape(-1)
    # From the first block boundary to the last one before the tail: drawn straight into place.
    first = min(-(-start // BLOCK) * BLOCK, stop)
    last = max(min(stop, sampler.tail) // BLOCK * BLOCK, first)
    if start < first:
        out[: first - start] = sampler.take(start, first)
    if first < last:
        sampler.draw_blocks(out[first - start : last - start], first)
    if last < stop:
        out[last - start :] = sampler.take(last, stop)
    sampler.finish()


def _as_box(plan: FillPlan, local: torch.Tensor) -> torch.Tensor:
    box = plan.layout.boxes[0]
    if local.shape == box.shape and local.stride() == box.local_strides:
        return local
    return local.as_strided(box.shape, box.local_strides, local.storage_offset())


def _in_order(local: torch.Tensor) -> torch.Tensor:
    """Return a local tensor without gaps as torch visits it in the order of its memory."""
    if local.is_contiguous():
        return local
    return local.as_strided((local.numel(),), (1,), local.storage_offset())
