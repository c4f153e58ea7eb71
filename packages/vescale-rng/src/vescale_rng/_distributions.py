"""Distributions: frozen values, each of which knows the one torch call that draws it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from vescale_rng._arguments import INTEGER, NUMBER, argument_error, is_integer, is_number

__all__ = [
    "Bernoulli",
    "Cauchy",
    "Distribution",
    "Exponential",
    "Geometric",
    "LogNormal",
    "Normal",
    "RandInt",
    "Random",
    "Uniform",
]

# Parameters that are numbers, whatever draws them; `RandInt` looks after its own.
_NUMBERS = frozenset(("low", "high", "mean", "std", "p", "rate", "median", "sigma"))


# Frozen, so that it can be hashed: what is found out about a draw is kept by distribution and
# dtype.
@dataclass(frozen=True)
class Distribution(ABC):
    """What to draw. Parameters are those of the torch method of the same name."""

    def __post_init__(self) -> None:
        """Refuse a parameter that is no number: numbers are judged by torch, when it draws."""
        # When it is made, and not when it is drawn: then some ranks may hold nothing, and would not
        # look.
        for name, value in tuple(vars(self).items()):
            if name not in _NUMBERS:
                continue
            if not is_number(value):
                raise argument_error(name, NUMBER, value)
            if type(value) not in (float, int):
                # Others calculate in their own precision: a float16 of numpy, a tensor.
                object.__setattr__(self, name, float(value))

    @abstractmethod
    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """Fill `out` in place by torch's own method, from where `generator` stands."""


@dataclass(frozen=True)
class Uniform(Distribution):
    """`Tensor.uniform_`: floats in [low, high)."""

    low: float = 0.0
    high: float = 1.0

    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """See `Distribution.draw`."""
        out.uniform_(self.low, self.high, generator=generator)


@dataclass(frozen=True)
class Normal(Distribution):
    """`Tensor.normal_`."""

    mean: float = 0.0
    std: float = 1.0

    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """See `Distribution.draw`."""
        out.normal_(self.mean, self.std, generator=generator)


@dataclass(frozen=True)
class LogNormal(Distribution):
    """`Tensor.log_normal_`: the exponential of a normal."""

    mean: float = 1.0
    std: float = 2.0

    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """See `Distribution.draw`."""
        out.log_normal_(self.mean, self.std, generator=generator)


@dataclass(frozen=True)
class Bernoulli(Distribution):
    """`Tensor.bernoulli_` with one probability: 1 with probability p, else 0."""

    p: float = 0.5

    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """See `Distribution.draw`."""
        out.bernoulli_(self.p, generator=generator)


@dataclass(frozen=True)
class RandInt(Distribution):
    """`Tensor.random_(low, high)`, which is what `torch.randint` draws: integers in [low, high).

    Without a `high`, `Tensor.random_(low, None)`: up to and with the greatest of the dtype.
    """

    low: int
    high: int | None

    def __post_init__(self) -> None:
        """Refuse bounds that are no integers."""
        for name, value in (("low", self.low), ("high", self.high)):
            if not is_integer(value) and not (name == "high" and value is None):
                raise argument_error(name, INTEGER, value)
            if value is not None:
                object.__setattr__(self, name, int(value))  # numpy's wrap around

    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """See `Distribution.draw`."""
        out.random_(self.low, self.high, generator=generator)


@dataclass(frozen=True)
class Random(Distribution):
    """`Tensor.random_()` without bounds: the full range that torch defines for the dtype."""

    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """See `Distribution.draw`."""
        out.random_(generator=generator)


@dataclass(frozen=True)
class Exponential(Distribution):
    """`Tensor.exponential_`."""

    rate: float = 1.0

    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """See `Distribution.draw`."""
        out.exponential_(self.rate, generator=generator)


@dataclass(frozen=True)
class Geometric(Distribution):
    """`Tensor.geometric_`: the number of trials up to the first success."""

    p: float

    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """See `Distribution.draw`."""
        out.geometric_(self.p, generator=generator)


@dataclass(frozen=True)
class Cauchy(Distribution):
    """`Tensor.cauchy_`."""

    median: float = 0.0
    sigma: float = 1.0

    def draw(self, out: torch.Tensor, generator: torch.Generator | None) -> None:
        """See `Distribution.draw`."""
        out.cauchy_(self.median, self.sigma, generator=generator)
