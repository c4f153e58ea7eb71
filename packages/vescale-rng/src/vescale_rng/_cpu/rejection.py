"""Rounds of draws of a global tensor until no element is rejected, in bounded memory.

One device draws round after round, each for the global tensor. Here the rounds run side by side,
each from its own place in the stream, over one window of elements after another: so no element
needs to be kept from one round to the next.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from vescale_rng._cpu.draw_order import draw_order_of
from vescale_rng._cpu.fill import store
from vescale_rng._cpu.samplers import Sampler, SerialOp, sampler_of
from vescale_rng._distributions import Distribution, Normal, Uniform
from vescale_rng._layout.fill_plan import FillPlan, fill_plan_of
from vescale_rng._layout.layout import ShardLayout, whole
from vescale_rng._layout.window_plan import Window


class Bounds(NamedTuple):
    """A normal distribution, and the interval that its values are wanted from."""

    mean: float
    std: float
    low: float
    high: float


def draw_normals(
    bounds: Bounds, plan: FillPlan, local: torch.Tensor, generator: torch.Generator
) -> None:
    """Draw normals, and draw again where they are out of bounds."""
    # As the dtype has them, so that a value which is rounded to a bound is inside.
    both = torch.tensor((bounds.low, bounds.high), dtype=local.dtype, device="cpu")
    low, high = both.tolist()
    rounds = _Rounds((Normal(bounds.mean, bounds.std),), plan, local.dtype, generator)

    def settle(start: int, stop: int) -> torch.Tensor:
        (values,) = rounds.take(0, start, stop)
        # A sampler's scratch is overwritten by the next range.
        values = values.clone()
        outside = (values < low) | (values > high)
        number = 1
        while bool(outside.any()):
            (again,) = rounds.take(number, start, stop)
            values = torch.where(outside, again, values)
            outside = (values < low) | (values > high)
            number += 1
        return values

    _run(plan, local, settle)
    rounds.finish(generator)


def draw_uniforms(
    bounds: Bounds, plan: FillPlan, local: torch.Tensor, generator: torch.Generator
) -> None:
    """Draw uniforms within the bounds, each kept with a probability like the normal's density."""
    mean, std, low, high = bounds
    mode = max(low, min(mean, high))
    log_peak = -0.5 * ((mode - mean) / std) ** 2
    kinds = (Uniform(low, high), Uniform())
    rounds = _Rounds(kinds, plan, local.dtype, generator)

    def draw(number: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        candidates, chances = rounds.take(number, start, stop)
        # The same torch ops as in `torch.nn.init`, so the same bits.
        density = candidates.clone().sub_(mean).div_(std).pow_(2).mul_(-0.5).sub_(log_peak)
        # In place: a sampler's scratch is its caller's until the next range is taken.
        return candidates, chances.log_().gt(density)

    def settle(start: int, stop: int) -> torch.Tensor:
        values, rejected = draw(0, start, stop)
        values = values.clone()
        number = 1
        while bool(rejected.any()):
            candidates, refused = draw(number, start, stop)
            values = torch.where(rejected, candidates, values)
            rejected = torch.where(rejected, refused, rejected)
            number += 1
        return values

    _run(plan, local, settle)
    rounds.finish(generator)


class _Rounds:
    """The ops of every round, each with a generator of its own where one device would start it."""

    def __init__(
        self,
        kinds: tuple[Distribution, ...],
        plan: FillPlan,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        self._kinds = kinds
        self._plan = plan
        self._dtype = dtype
        self._longest = _everything(plan).longest
        # As many as the unluckiest element needs: they grow with the logarithm of the elements, and
        # each keeps one window of scratch for each op.
        self._rounds: list[tuple[Sampler, ...]] = []
        # Where the next round starts.
        self._next = generator.get_state()

    def take(self, number: int, start: int, stop: int) -> list[torch.Tensor]:
        """Return what the ops of a round have for a range of elements; ranges come in order."""
        while number >= len(self._rounds):
            self._open()
        return [sampler.take(start, stop) for sampler in self._rounds[number]]

    def finish(self, generator: torch.Generator) -> None:
        """Leave `generator` where the last round leaves it that any element needed."""
        generator.set_state(self._next)

    def _open(self) -> None:
        samplers = []
        for kind in self._kinds:
            # One generator draws the windows of this round, the other one shows where it ends.
            generator, after = torch.Generator(), torch.Generator()
            generator.set_state(self._next)
            after.set_state(self._next)
            samplers.append(self._sampler(kind, generator))
            self._sampler(kind, after).finish()
            self._next = after.get_state()
        self._rounds.append(tuple(samplers))

    def _sampler(self, kind: Distribution, generator: torch.Generator) -> Sampler:
        numel = self._plan.numel
        draw_order = draw_order_of(kind, self._dtype, numel, self._plan.contiguous)
        return sampler_of(SerialOp(kind, numel, self._dtype, generator), draw_order, self._longest)


def _everything(plan: FillPlan) -> FillPlan:
    """Return the plan of all of the tensor, of whose windows those of `plan` are parts."""
    layout: ShardLayout = whole(plan.layout.global_shape, plan.layout.memory_order)
    strides = layout.boxes[0].local_strides if layout.boxes else (1,) * len(layout.global_shape)
    return fill_plan_of(layout, layout.global_shape, strides)


def _run(plan: FillPlan, local: torch.Tensor, settle: Callable[[int, int], torch.Tensor]) -> None:
    """Draw until all elements are accepted, window by window; store this rank's."""
    mine: Iterator[Window] = plan.windows()
    wanted = next(mine, None)
    # All windows of the tensor, and not this rank's alone: how many rounds there are is decided by
    # the worst element of any rank, and every generator has to end after the last of them.
    for window in _everything(plan).windows():
        values = settle(window.start, window.stop)
        while wanted is not None and wanted.start < window.stop:
            store(wanted, values[wanted.start - window.start :], local)
            wanted = next(mine, None)
