"""Random ops: what they draw, from which generator, and how far they move it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from vescale_rng import (
    Bernoulli,
    Cauchy,
    Distribution,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Random,
    RngError,
    Uniform,
    use,
)
from vescale_rng.cuda import CudaPosition
from vescale_rng.streams import Position, RandPerm, position, skip


@dataclass(frozen=True)
class Draw:
    """Where a random op draws.

    Attributes:
        distribution: what it draws into all of one row-major tensor; None where it draws otherwise.
        generator: from which generator.
        place: where that stood.
    """

    distribution: Distribution | None
    generator: torch.Generator
    place: Position | CudaPosition


_Read = Callable[[Mapping[str, Any]], Any]

# By name of the op; arguments by the names of torch's schemas.
_DISTRIBUTIONS: Final[Mapping[str, _Read]] = {
    "uniform_": lambda a: Uniform(a["from"], a["to"]),
    "normal_": lambda a: Normal(a["mean"], a["std"]),
    "bernoulli_": lambda a: Bernoulli(a["p"]),
    "random_": lambda a: (
        # Without bounds it draws from all numbers that the dtype can count with.
        RandInt(a.get("from", 0), a["to"]) if "from" in a or "to" in a else Random()
    ),
    "exponential_": lambda a: Exponential(a["lambd"]),
    "log_normal_": lambda a: LogNormal(a["mean"], a["std"]),
    "geometric_": lambda a: Geometric(a["p"]),
    "cauchy_": lambda a: Cauchy(a["median"], a["sigma"]),
    "rand": lambda a: Uniform(),
    "rand_like": lambda a: Uniform(),
    "randn": lambda a: Normal(),
    "randn_like": lambda a: Normal(),
    "randint": lambda a: RandInt(a.get("low", 0), a["high"]),
    "randint_like": lambda a: RandInt(a.get("low", 0), a["high"]),
    "randperm": lambda a: RandPerm(),
}


def is_random(func: Any) -> bool:
    """Whether an op draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def generator_of(arguments: Mapping[str, Any], device: torch.device) -> torch.Generator:
    """The generator that an op draws from: the one that it is given, or that of its device."""
    given = arguments.get("generator")
    if given is not None:
        return given  # type: ignore[no-any-return]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.init()  # type: ignore[no-untyped-call]  # there are no generators before
        return torch.cuda.default_generators[index]
    return torch.default_generator


def skipped(
    name: str, arguments: Mapping[str, Any], target: Tensor, generator: torch.Generator
) -> Draw | None:
    """Move a generator past what an op draws into `target`, a tensor on the meta device.

    Returns:
        What is drawn, and where; None where that cannot be told without running the op, and the
        generator has not moved.
    """
    read = _DISTRIBUTIONS.get(name)
    if read is None or not target.is_contiguous():
        return None
    # A probability for each element is no distribution of one tensor.
    if any(isinstance(one, Tensor) for key, one in arguments.items() if key != "self"):
        return None
    place = position(generator)
    # Whatever policy the caller has: what is built draws as torch does.
    with use("native"):
        try:
            found = read(arguments)
            skip(found, target.shape, target.dtype, generator=generator)
        # A schema with other names of arguments, or a dtype that vescale-rng cannot skip.
        except (KeyError, RngError):
            return None
    return Draw(found if isinstance(found, Distribution) else None, generator, place)
