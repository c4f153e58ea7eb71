"""Ops whose values decide how many numbers they use: drawn alike on every rank, or refused.

torch's CPU kernels reject and draw again (`poisson`, `binomial`), or draw for some elements only
(`rrelu`: those that are not positive). Where an element stands in the stream then depends on all
the elements before it, which other ranks have.
"""

import torch
from torch.nn import functional

from vescale_rng._arguments import FLOATS, checked
from vescale_rng._draw.devices import check_device, cpu_generator
from vescale_rng._errors import DistributionError, LayoutError
from vescale_rng._layout.fill_plan import plan_for
from vescale_rng._layout.layout import LayoutLike, as_layout
from vescale_rng._policy import require_native


@checked(rates=FLOATS)
def poisson(
    rates: torch.Tensor, layout: LayoutLike, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw `torch.poisson`, of rates that are replicated.

    Args:
        rates: all of them, on CPU.
        layout: says that these are all.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: `rates` is a shard only: gather it first.
        DistributionError: torch refuses the rates.
        DeviceError: the tensor or the generator is not on CPU.
        PolicyError: the policy is not "native".
    """
    generator = _check("poisson", "rates", rates, layout, generator)
    try:
        return torch.poisson(rates, generator)
    except RuntimeError as error:
        raise DistributionError(f"poisson: torch says {str(error).splitlines()[0]!r}") from error


@checked(count=FLOATS)
def binomial(
    count: torch.Tensor,
    probabilities: torch.Tensor,
    layout: LayoutLike,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw `torch.binomial`, of counts and probabilities that are replicated.

    Args:
        count: all of them, on CPU.
        probabilities: one for each of them.
        layout: says that these are all.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: `count` is a shard only: gather it first.
        DistributionError: torch refuses the arguments.
        DeviceError: a tensor or the generator is not on CPU.
        PolicyError: the policy is not "native".
    """
    generator = _check("binomial", "count", count, layout, generator)
    check_device(probabilities, "probabilities")
    try:
        return torch.binomial(count, probabilities, generator)
    except RuntimeError as error:
        raise DistributionError(f"binomial: torch says {str(error).splitlines()[0]!r}") from error


@checked(input=FLOATS)
def rrelu(
    input: torch.Tensor,
    layout: LayoutLike,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Compute `F.rrelu(x, lower, upper, training=True)`, of an x that is replicated.

    Args:
        input: all of x, on CPU.
        layout: says that it is all.
        lower: least slope of what is not positive.
        upper: greatest slope.
        generator: a CPU generator, in the same state on every rank; None is torch's default.

    Raises:
        LayoutError: `input` is a shard only: gather it first.
        DistributionError: torch refuses the slopes or the dtype.
        DeviceError: the tensor or the generator is not on CPU.
        PolicyError: the policy is not "native".
    """
    given = generator
    generator = _check("rrelu", "input", input, layout, generator)
    try:
        # torch's functional form takes no generator; the other form draws the same.
        if given is None:
            return functional.rrelu(input, lower, upper, training=True)
        return torch.rrelu(input, lower, upper, True, generator=generator)
    except RuntimeError as error:
        raise DistributionError(
            f"rrelu(lower={lower}, upper={upper}): torch says {str(error).splitlines()[0]!r}"
        ) from error


def _check(
    what: str,
    name: str,
    local: torch.Tensor,
    layout: LayoutLike,
    generator: torch.Generator | None,
) -> torch.Generator:
    require_native(what)
    check_device(local, name)
    plan = plan_for(as_layout(layout), local)
    # A fact of every rank alike, unless a layout is: no rank draws what another refuses.
    if plan.numel and not plan.whole:
        raise LayoutError(
            f"{what} takes as many random numbers as its values say, so a piece cannot be drawn "
            f"alone: this rank holds {local.numel()} of {plan.numel} elements (or holds them in "
            "another memory order). Gather the tensor, and give it with whole(shape)"
        )
    return cpu_generator(generator)
