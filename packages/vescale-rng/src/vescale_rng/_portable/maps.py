"""Maps words to values: one map for each distribution, the same code for numpy and torch.

A narrow map makes four elements of a block, from 32-bit words; a wide one makes two, from 64-bit
words. `SPEC.md` states each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil, inf
from typing import Any

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
from vescale_rng._errors import PolicyError
from vescale_rng._portable.arrays import Arrays
from vescale_rng._portable.functions import DOUBLE, SINGLE, Format, cos_sin, exp, minus_log
from vescale_rng._portable.scalars import minus_log1p_of_minus


@dataclass(frozen=True)
class FusedMap:
    """A narrow map in the form that the kernel takes: its name there, and two numbers."""

    kind: str
    a: float | int = 0
    b: float | int = 0


@dataclass(frozen=True)
class Map:
    """How words become the values of one distribution in one dtype.

    Attributes:
        wide: whether an element takes a 64-bit word, so that a block makes two, not four.
        values: from arrays and the words of blocks to values, in the words' order.
        excluded: (high, low), where a value that its last rounding has made equal to high becomes
            low; None where that cannot be.
        fused: the same map in the kernel, where that has it.
    """

    wide: bool
    values: Callable[[Arrays, Any], Any]
    excluded: tuple[float, float] | None = None
    fused: FusedMap | None = None

    def of(self, arrays: Arrays, words: Any) -> Any:
        """Return the values of these words."""
        # Infinity is a value, and no reason for numpy to warn.
        with np.errstate(all="ignore"):
            return self.values(arrays, words)

    def rounded(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return `excluded` as values of `dtype`: only so can one be equal to another."""
        if self.excluded is None:
            return 0.0, 0.0
        high, low = torch.tensor(self.excluded, dtype=dtype, device="cpu").tolist()
        return high, low


# torch draws ranges below this from 32-bit words, and so do we: the bias is at most 1/16.
_NARROW_RANGE = 1 << 28
_INTEGERS_OF_FLOATS = {
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
    torch.float32: 1 << 24,
    torch.float64: 1 << 53,
}


@lru_cache(maxsize=4096)
def map_of(distribution: Distribution, dtype: torch.dtype) -> Map:
    """Return the map of a distribution that torch draws for this dtype.

    Raises:
        PolicyError: the portable policy has none.
    """
    if dtype.is_complex:
        raise PolicyError(
            f'the policy "portable" has no map for {dtype}: draw torch.view_as_real of the tensor, '
            'or draw it under use("native")'
        )
    # bfloat16 and float16 values are float32 values, rounded.
    wide = dtype == torch.float64
    kind = DOUBLE if wide else SINGLE
    match distribution:
        case Uniform(low, high):
            return _uniform_map(kind, low, high, dtype)
        case Normal(mean, std):
            mean, std = kind.nearest(mean), kind.nearest(std)
            fused = None if wide else FusedMap("normal", mean, std)
            return Map(wide, partial(normal_values, kind, mean, std), fused=fused)
        case LogNormal(mean, std):
            return Map(wide, partial(_log_normal, kind, kind.nearest(mean), kind.nearest(std)))
        case Exponential(rate):
            scale = kind.nearest(1.0 / rate)
            fused = None if wide else FusedMap("exponential", scale)
            return Map(wide, partial(_exponential, kind, scale), fused=fused)
        case Cauchy(median, sigma):
            return Map(wide, partial(_cauchy, kind, kind.nearest(median), kind.nearest(sigma)))
        case Geometric(p):
            return _geometric_map(p, dtype)
        case Bernoulli(p):
            # The product is exact, and for an integer word w < p * 2**32 is w < the integer above
            # it.
            return _bernoulli_map(ceil(p * 2.0**32))
        case RandInt(low, high):
            integers = _integer_map(low, (_beyond(dtype) if high is None else high) - low)
            return integers if high is None else _below(integers, low, high, dtype)
        case Random():
            return _integer_map(0, _beyond(dtype))
    raise PolicyError(
        f'{distribution} has no map under the policy "portable": draw it under use("native"), or '
        "from a distribution that has one (SPEC.md lists them)"
    )


def _beyond(dtype: torch.dtype) -> int:
    """Return one more than the greatest integer that `random_` draws for a dtype."""
    if dtype == torch.bool:
        return 2
    if dtype in _INTEGERS_OF_FLOATS:
        return _INTEGERS_OF_FLOATS[dtype] + 1
    return int(torch.iinfo(dtype).max) + 1


def _uniform_map(kind: Format, low: float, high: float, dtype: torch.dtype) -> Map:
    low, high = kind.nearest(low), kind.nearest(high)
    # In [0, 1) nothing is rounded before the dtype is, so float32 and float64 never reach 1.
    exact = (low, high) == (0.0, 1.0) and dtype in (torch.float32, torch.float64)
    extent = kind.nearest(high - low)
    values = partial(uniform_values, kind, low, extent)
    fused = FusedMap("uniform", low, extent) if kind is SINGLE else None
    return Map(kind is DOUBLE, values, None if exact else (high, low), fused)


def uniform_values(kind: Format, low: float, extent: float, arrays: Arrays, words: Any) -> Any:
    """Make uniforms from `low` on, of each word's lowest bits."""
    digits = kind.mantissa + 1
    kept = arrays.low(words, digits) if kind is DOUBLE else arrays.signed(words & 0xFFFFFF, 32)
    values = arrays.floats(kept, kind.width)
    values *= 2.0**-digits
    # By 1 and from 0 is the same without.
    if extent != 1.0:
        values *= extent
    if low != 0.0:
        values += low
    return values


def positive_uniform(kind: Format, arrays: Arrays, words: Any) -> Any:
    """Return (w + 1/2) / 2**width, rounded: in (0, 1]."""
    if kind is SINGLE:
        values = arrays.floats(words, 32)
        values *= 2.0**-32
        values += 2.0**-33
        return values
    values = arrays.floats(arrays.high(words), 64)
    values *= 2.0**-32
    rest = arrays.floats(arrays.low(words, 32), 64)
    rest *= 2.0**-64
    rest += 2.0**-65
    values += rest
    return values


def _standard_normal(kind: Format, arrays: Arrays, words: Any) -> Any:
    """Compute Box-Muller: a pair of words makes two normals, in torch.func._random's order."""
    radius = minus_log(arrays, kind, positive_uniform(kind, arrays, words[0]))
    radius *= 2.0
    radius = arrays.sqrt(radius)
    cosine, sine = cos_sin(arrays, kind, words[1])
    cosine *= radius
    sine *= radius
    return arrays.pair(cosine, sine)


def normal_values(kind: Format, mean: float, std: float, arrays: Arrays, words: Any) -> Any:
    """Make normals of each pair of words."""
    values = _standard_normal(kind, arrays, words)
    if std != 1.0:
        values *= std
    # Also when it is zero: that makes every zero a positive one.
    values += mean
    return values


def _log_normal(kind: Format, mean: float, std: float, arrays: Arrays, words: Any) -> Any:
    return exp(arrays, kind, normal_values(kind, mean, std, arrays, words))


def standard_exponential(kind: Format, arrays: Arrays, words: Any) -> Any:
    """Return -log of a uniform; never zero, as with torch."""
    values = minus_log(arrays, kind, positive_uniform(kind, arrays, words))
    # Where the uniform was rounded to 1: half an epsilon, as in torch. The upper end is never
    # reached: -log(2**-65) is 45.
    return arrays.clamp(values, 2.0 ** -(kind.mantissa + 1), 2.0**10)


def _exponential(kind: Format, scale: float, arrays: Arrays, words: Any) -> Any:
    values = standard_exponential(kind, arrays, words)
    values *= scale
    return values


def _cauchy(kind: Format, median: float, sigma: float, arrays: Arrays, words: Any) -> Any:
    """Return the tangent of half an angle, by whichever half-angle formula does not cancel."""
    cosine, sine = cos_sin(arrays, kind, words)
    left = cosine < 0.0
    over = arrays.where(left, sine, cosine + 1.0)
    under = arrays.where(left, 1.0 - cosine, sine)
    over /= under
    over *= -sigma
    over += median
    return over


def _geometric_map(p: float, dtype: torch.dtype) -> Map:
    # Integers up to 2**53 want more digits than float32 has.
    wide = dtype not in (torch.float32, torch.bfloat16, torch.float16)
    kind = DOUBLE if wide else SINGLE
    # 2**63 - 1 is no float; the greatest one below it is.
    most = inf if dtype.is_floating_point else min(torch.iinfo(dtype).max, 2.0**63 - 1024)
    scale = kind.nearest(1.0 / minus_log1p_of_minus(p))
    return Map(wide, partial(_geometric, kind, scale, most))


def _geometric(kind: Format, scale: float, most: float, arrays: Arrays, words: Any) -> Any:
    values = standard_exponential(kind, arrays, words)
    values *= scale
    # Up, not down.
    values *= -1.0
    values = arrays.floor(values)
    values *= -1.0
    return arrays.clamp(values, 1.0, most)


def _bernoulli_map(threshold: int) -> Map:
    # The kernel compares signed numbers, so that one compilation serves all thresholds.
    fused = FusedMap("bernoulli", threshold - 1 - (1 << 31)) if threshold else None
    return Map(False, partial(_bernoulli, threshold), fused=fused)


def _bernoulli(threshold: int, arrays: Arrays, words: Any) -> Any:
    # w < threshold, in a form that fits in 32 bits for all thresholds from 0 to 2**32.
    return words <= threshold - 1 if threshold else words < 0


def _integer_map(low: int, extent: int) -> Map:
    wide = extent >= _NARROW_RANGE
    fused = None if wide else FusedMap("integers", low, extent)
    return Map(wide, partial(_integers, low, extent, 64 if wide else 32), fused=fused)


def _below(kind: Map, low: int, high: int, dtype: torch.dtype) -> Map:
    """Make the same map, also where `dtype` rounds large integers: none of them up to `high`."""
    exact = _INTEGERS_OF_FLOATS.get(dtype)
    if exact is None or max(abs(low), abs(high)) <= exact:
        return kind
    return replace(kind, excluded=(float(high), float(low)), fused=None)


def _integers(low: int, extent: int, width: Any, arrays: Arrays, words: Any) -> Any:
    values = arrays.modulo(words, extent, width)
    # Not in place: what the modulo leaves as it is may be the words themselves.
    return values + low if low else values
