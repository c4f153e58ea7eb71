"""`trunc_normal_`: normals within bounds, in whichever way the installed torch draws them."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from math import erf, sqrt

import torch
from torch.nn import init

from vescale_rng import _portable as portable
from vescale_rng._arguments import checked
from vescale_rng._cpu.rejection import Bounds, draw_normals, draw_uniforms
from vescale_rng._distributions import Normal, Uniform
from vescale_rng._draw.devices import check_device, cpu_generator
from vescale_rng._draw.fill import fill_
from vescale_rng._errors import DistributionError
from vescale_rng._layout.fill_plan import plan_for
from vescale_rng._layout.layout import LayoutLike, ShardLayout, as_layout, whole
from vescale_rng._layout.of_tensor import layout_of_tensor, local_of
from vescale_rng._policy import policy, use

_Draw = Callable[["TruncatedNormal", ShardLayout, torch.Tensor, torch.Generator], None]

# No normal of torch's is farther out: the logarithm of the least double above 0 that is drawn,
# 2**-53, gives 8.6 deviations. The rest is for rounding.
_REACH = 9.0


@checked()
def trunc_normal_(
    local: torch.Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: torch.Generator | None = None,
    *,
    layout: LayoutLike | None = None,
) -> torch.Tensor:
    """Fill `local` as `torch.nn.init.trunc_normal_` fills the global tensor: normals within [a, b].

    Since torch 2.13 elements outside are drawn again, all of the tensor at a time, until none is
    left. How often is decided by elements of other ranks, so every rank draws all of it: in
    bounded memory, and in the time of one device. Bounds that no normal reaches (9 deviations) cost
    what `fill_` costs.

    Args:
        local: this rank's elements, on CPU, floating point.
        mean: of the normal distribution.
        std: its deviation.
        a: the least value.
        b: the greatest.
        generator: a CPU generator, in the same state on every rank; None is torch's default.
        layout: which elements of the global tensor `local` holds; None asks `local` itself.

    Returns:
        `local`.

    Raises:
        LayoutError: the layout contradicts itself or does not cover `local`.
        DistributionError: the deviation is not positive, the bounds are no interval, or the dtype
            is not floating point.
        DeviceError: the tensor or the generator is not on CPU.
    """
    held = as_layout(layout_of_tensor(local) if layout is None else layout)
    target = local_of(local)
    check_device(target)
    generator = cpu_generator(generator)
    wanted = TruncatedNormal(mean, std, a, b)
    if not (std > 0 and a < b and target.is_floating_point()):
        raise DistributionError(
            f"trunc_normal_ takes std > 0, a < b and a floating point `local`, got std={std}, "
            f"a={a}, b={b}, {target.dtype}"
        )
    if mean < a - 2 * std or mean > b + 2 * std:
        warnings.warn(
            f"trunc_normal_: mean {mean} is more than two deviations outside of [{a}, {b}]: few "
            "normals are there, and the values may not be distributed rightly",
            stacklevel=2,
        )
    # As in torch.nn.init: an initialisation has no graph.
    with torch.no_grad():
        _draw(wanted, held, target.detach(), generator)
    return local


@dataclass(frozen=True)
class TruncatedNormal:
    """The parameters of `trunc_normal_`."""

    mean: float
    std: float
    a: float
    b: float

    def below(self, bound: float) -> float:
        """Return the probability of a normal below `bound`."""
        return (1.0 + erf((bound - self.mean) / self.std / sqrt(2.0))) / 2.0

    @property
    def unreachable(self) -> bool:
        """Whether no normal that torch draws is outside the bounds."""
        reach = _REACH * self.std
        return self.a <= self.mean - reach and self.mean + reach <= self.b


class Way(Enum):
    """How `trunc_normal_` draws."""

    AGAIN = auto()  # what is out of bounds is drawn again (torch 2.13)
    INVERSE = auto()  # one uniform for each element, through the inverse of erf (until 2.12)


def _draw(
    wanted: TruncatedNormal, layout: ShardLayout, local: torch.Tensor, generator: torch.Generator
) -> None:
    plan = plan_for(layout, local)
    if policy() == "portable":
        # No elements take no key; and where there are some, each has numbers of its own, so that no
        # element that is drawn again moves those of another.
        if plan.numel:
            bounds = Bounds(wanted.mean, wanted.std, wanted.a, wanted.b)
            key = portable.draw_key(generator, local.device)
            portable.truncated_normal(local, bounds, plan.layout, key)
        return
    way = _way()
    if way is Way.INVERSE:
        _draw_inverse(wanted, layout, local, generator)
    else:
        _draw_again(wanted, layout, local, generator)


def _draw_again(
    wanted: TruncatedNormal, layout: ShardLayout, local: torch.Tensor, generator: torch.Generator
) -> None:
    if wanted.unreachable:
        fill_(local, Normal(wanted.mean, wanted.std), layout, generator)
        return
    bounds = Bounds(wanted.mean, wanted.std, wanted.a, wanted.b)
    # The same choice as torch's: whether enough normals are inside.
    draw = draw_normals if wanted.below(wanted.b) - wanted.below(wanted.a) > 0.3 else draw_uniforms
    draw(bounds, plan_for(layout, local), local, generator)


def _draw_inverse(
    wanted: TruncatedNormal, layout: ShardLayout, local: torch.Tensor, generator: torch.Generator
) -> None:
    low, high = wanted.below(wanted.a), wanted.below(wanted.b)
    fill_(local, Uniform(2 * low - 1, 2 * high - 1), layout, generator)
    local.erfinv_().mul_(wanted.std * sqrt(2.0)).add_(wanted.mean).clamp_(wanted.a, wanted.b)


@cache
def _way() -> Way:
    """Find out which way the installed torch goes, by trying both against it.

    Raises:
        DistributionError: it goes another.
    """
    # One with many normals inside, one with few: torch draws again by normals, or by uniforms.
    examples = (TruncatedNormal(0, 1, -1, 2), TruncatedNormal(0, 1, 1, 2))
    # Whatever policy the caller has: it is torch's own stream that is asked about.
    with use("native"):
        for way, draw in ((Way.AGAIN, _draw_again), (Way.INVERSE, _draw_inverse)):
            if all(_agrees(draw, wanted) for wanted in examples):
                return way
    raise DistributionError(
        f"torch {torch.__version__} draws trunc_normal_ in a way that this version of vescale-rng "
        "does not know"
    )


def _agrees(draw: _Draw, wanted: TruncatedNormal) -> bool:
    # So many elements that some are out of bounds at first, and the two ways part.
    expected, found = (torch.empty(40, dtype=torch.float64, device="cpu") for _ in range(2))
    one, other = (torch.Generator().manual_seed(5) for _ in range(2))
    init.trunc_normal_(expected, wanted.mean, wanted.std, wanted.a, wanted.b, one)
    draw(wanted, whole((40,)), found, other)
    # The state as well: a way that ends elsewhere would shift all that is drawn after it.
    return torch.equal(expected, found) and torch.equal(one.get_state(), other.get_state())
