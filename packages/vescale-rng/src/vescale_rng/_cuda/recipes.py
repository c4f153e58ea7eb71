"""Lists how each distribution is drawn on CUDA: its words, and the arithmetic on them.

Parameters are rounded here as ATen rounds them on the host; a kernel gets them as 64-bit integers,
floating-point ones by their bits.
"""

import struct
from dataclasses import dataclass

import numpy as np
import torch

from vescale_rng._distributions import (
    Bernoulli,
    Cauchy,
    Distribution,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Random,
    Uniform,
)
from vescale_rng._errors import DistributionError

# Bits of the significand, the hidden one included.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# Ranges from here on use two words for an element.
_TWO_WORDS_FROM = 1 << 28


@dataclass(frozen=True)
class Recipe:
    """How an op is drawn.

    Attributes:
        unroll: elements that a thread takes from each block of four words: 4, or 2 of two words.
        kind: the arithmetic of the kernel; None where only ATen itself can draw it.
        parameters: of that arithmetic, each as a signed 64-bit integer.
        double: whether the arithmetic is in fp64.
    """

    unroll: int
    kind: str | None
    parameters: tuple[int, int, int] = (0, 0, 0)
    double: bool = False

    def wave(self, threads: int) -> int:
        """Count the elements that `threads` threads fill in one turn."""
        return threads * self.unroll


def recipe_of(distribution: Distribution, dtype: torch.dtype) -> Recipe:
    """Tell how ATen draws `distribution` into a tensor of `dtype` on CUDA.

    Raises:
        DistributionError: it is none that is drawn element by element there.
    """
    double = dtype == torch.float64
    # What torch refuses for a dtype is refused by torch: no dtype is checked here.
    match distribution:
        case Uniform(low, high):
            return _real("uniform", double, *_bounds(low, high, dtype))
        case Normal(mean, std):
            return _real("normal", double, mean, std)
        case LogNormal(mean, std):
            return _real("log_normal", double, mean, std)
        case Bernoulli(p):
            return _real("bernoulli" if _known(dtype) else None, double, p)
        case Exponential(rate):
            return _real("exponential", double, _minus_mean(rate, double))
        case Geometric(p):
            # ATen itself, where a number can be outside a small integer's range, which is
            # undefined, and for fp64, whose log1p nvcc and triton contract in different places.
            fits = dtype in (*_DIGITS, torch.int64, torch.int32) and not double
            return _real("geometric" if fits else None, double, p)
        case Cauchy(median, sigma):
            return _real("cauchy", double, median, sigma)
        case RandInt(low, high):
            return _integers(low, high, dtype)
        case Random():
            return _random(dtype)
    raise DistributionError(
        f"{distribution} on CUDA: torch does not draw it element by element there, so a piece of "
        "it cannot be drawn alone"
    )


def _known(dtype: torch.dtype) -> bool:
    return dtype in _DIGITS or dtype in _INTEGERS or dtype == torch.bool


def _real(kind: str | None, double: bool, *values: float) -> Recipe:
    a, b, c = (_bits(value) for value in (*values, 0.0, 0.0, 0.0)[:3])
    return Recipe(2 if double else 4, kind, (a, b, c), double)


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _bounds(low: float, high: float, dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the lower bound, the span and the upper bound of `uniform_`, rounded to the dtype."""
    if dtype not in _DIGITS:
        return low, high - low, high
    try:
        first, last = (torch.tensor(x, dtype=dtype, device="cpu") for x in (low, high))
    except RuntimeError as error:
        raise DistributionError(
            f"Uniform({low}, {high}) cannot be drawn for {dtype}: {error}"
        ) from error
    # Also the difference is computed in the dtype of the tensor, not in that of the arithmetic.
    return first.item(), (last - first).item(), last.item()


def _minus_mean(rate: float, double: bool) -> float:
    # The rate is rounded to the type of the kernel's arithmetic before it divides: a quotient of
    # the fp64 rate, rounded then, could differ in the last bit.
    real = np.float64 if double else np.float32
    # A rate of zero or of infinity is torch's to refuse or to draw, and no reason for numpy to
    # warn.
    with np.errstate(all="ignore"):
        return float(real(-1) / real(rate))


def _integers(low: int, high: int | None, dtype: torch.dtype) -> Recipe:
    if high is None:
        high = _beyond(dtype)
    span = high - low
    unroll = 2 if span >= _TWO_WORDS_FROM else 4
    known = _known(dtype) and span < 1 << 64
    if dtype in _DIGITS:
        # Bounds that the dtype cannot tell apart are moved by ATen.
        known = known and -(1 << _DIGITS[dtype]) <= low and high <= (1 << _DIGITS[dtype]) + 1
    kind = "modulo" if known else None
    return Recipe(unroll, kind, (_signed(span), low, 0) if known else (0, 0, 0))


def _beyond(dtype: torch.dtype) -> int:
    """Return one more than the greatest integer of `random_(low, None)`."""
    if dtype in _DIGITS:
        return (1 << _DIGITS[dtype]) + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


def _random(dtype: torch.dtype) -> Recipe:
    """Return the recipe of `random_()`: all integers that the dtype holds, or none negative."""
    if not _known(dtype):
        return Recipe(4, None)
    unroll = 2 if dtype in (torch.float64, torch.int64) else 4
    return Recipe(unroll, "modulo", (_signed(_beyond(dtype)), 0, 0))


def _signed(value: int) -> int:
    """Read a 64-bit pattern as a signed integer."""
    return value - (1 << 64) if value >= 1 << 63 else value
