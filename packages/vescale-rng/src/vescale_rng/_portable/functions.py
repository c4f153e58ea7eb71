"""log, exp, sin and cos of +, -, *, / and sqrt alone, so that every device gives the same bits.

Taylor series, whose coefficients need no table: the nearest floats to rationals. Arguments are
first reduced to near zero by exact operations. The tests measure the errors: two units in the last
place, and for a cosine or a sine two units in the last place of 1.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import factorial, pi
from typing import Any

import numpy as np

from vescale_rng._portable.arrays import Arrays, Width


@dataclass(frozen=True)
class Format:
    """A float format, and the constants of the functions in it, each the nearest such float.

    Attributes:
        width: bits.
        mantissa: explicit bits of the significand.
        one: the bits of 1.0.
        root: the bits of sqrt(1/2).
        ln2: its upper part, whose products with exponents are exact, and the rest.
        log: of s**2 in log((1 + s) / (1 - s)) / s - 2.
        sin, cos, exp: of their series in the square of the angle, or in the argument.
        span: arguments of exp beyond which it is 0 or infinite.
    """

    width: Width
    mantissa: int
    one: int
    root: int
    ln2: tuple[float, float]
    log: tuple[float, ...]
    sin: tuple[float, ...]
    cos: tuple[float, ...]
    exp: tuple[float, ...]
    span: tuple[float, float]

    def nearest(self, value: float | Fraction) -> float:
        """Return the float of this format nearest to `value`."""
        return _nearest(self.width, value)

    @property
    def turn(self) -> float:
        """2 pi."""
        return self.nearest(2 * pi)


def _nearest(width: Width, value: float | Fraction) -> float:
    return float(np.float32(float(value))) if width == 32 else float(value)


def _format(width: Width, mantissa: int, one: int, root: int, terms: tuple[int, ...]) -> Format:
    """Return a format with so many terms in the series of log, sin, cos and exp."""
    log, sin, cos, exp = terms

    def series(values: list[Fraction]) -> tuple[float, ...]:
        # Highest power first, as Horner takes them.
        return tuple(_nearest(width, value) for value in reversed(values))

    # ln 2 to 100 bits; the upper part leaves room for an exponent's 11 bits.
    ln2 = Fraction(878668439483319573618263538048, 2**100)
    room = mantissa - 11
    upper = Fraction(int(ln2 * 2**room), 2**room)
    return Format(
        width=width,
        mantissa=mantissa,
        one=one,
        root=root,
        ln2=(float(upper), _nearest(width, ln2 - upper)),
        log=series([Fraction(2, 2 * k + 3) for k in range(log)]),
        sin=series([Fraction((-1) ** k, factorial(2 * k + 1)) for k in range(sin)]),
        cos=series([Fraction((-1) ** k, factorial(2 * k)) for k in range(cos)]),
        exp=series([Fraction(1, factorial(k)) for k in range(exp)]),
        span=(-104.0, 89.0) if width == 32 else (-746.0, 710.0),
    )


SINGLE = _format(32, 23, 0x3F800000, 0x3F3504F3, (4, 7, 8, 8))
DOUBLE = _format(64, 52, 0x3FF0000000000000, 0x3FE6A09E667F3BCD, (11, 12, 12, 15))


def _horner(coefficients: tuple[float, ...], x: Any) -> Any:
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value += coefficient
        value *= x
    value += coefficients[-1]
    return value


def minus_log(arrays: Arrays, kind: Format, x: Any) -> Any:
    """Compute the negative logarithm of positive normal floats; zero, not minus zero, for 1."""
    # x = 2**exponent * significand, with the significand between sqrt(1/2) and sqrt(2).
    # The bits of floats are ordered as the floats are: moved up by this, the exponent changes at
    # sqrt(1/2) times a power of two, and not at the power itself. So the rest lies around 1, where
    # the series is short.
    integers = arrays.bits(x) + (kind.one - kind.root)
    exponents = (integers >> kind.mantissa) - (kind.one >> kind.mantissa)
    significands = arrays.from_bits((integers & ((1 << kind.mantissa) - 1)) + kind.root)
    above = significands - 1.0
    significands += 1.0
    above /= significands
    square = above * above
    series = _horner(kind.log, square)
    series *= square
    series *= above
    above *= 2.0
    series += above
    powers = arrays.floats(exponents, kind.width)
    series += powers * kind.ln2[1]
    powers *= kind.ln2[0]
    return 0.0 - (powers + series)


def exp(arrays: Arrays, kind: Format, x: Any) -> Any:
    """Compute the exponential; infinite or zero where the format ends."""
    x = arrays.clamp(x, *kind.span)
    powers = arrays.floor(x * kind.nearest(1 / _LN2) + 0.5)
    # Cody and Waite: the product with the upper part is exact, so no digit of x is lost before the
    # small lower part is taken off.
    rest = x - powers * kind.ln2[0]
    rest -= powers * kind.ln2[1]
    value = _horner(kind.exp, rest)
    # 2**power in two steps: one alone leaves the format before the result does.
    half = arrays.floor(powers * 0.5)
    value *= _power_of_two(arrays, kind, half)
    value *= _power_of_two(arrays, kind, powers - half)
    return value


_LN2 = 0.6931471805599453


def _power_of_two(arrays: Arrays, kind: Format, powers: Any) -> Any:
    # The sum is exact: its last place is worth one, so the power stands in its lowest bits.
    last_place_one = float(3 << (kind.mantissa - 1))
    integers = arrays.bits(powers + last_place_one) << kind.mantissa
    return arrays.from_bits(integers + kind.one)


def cos_sin(arrays: Arrays, kind: Format, words: Any) -> tuple[Any, Any]:
    """Compute the cosine and the sine of (w + 1/2) / 2**width turns, for words w."""
    # To the nearest half turn, in integers: exact whatever the angle.
    quarter = 1 << (kind.width - 2)
    shifted = arrays.plus(words, quarter, kind.width)
    sign = arrays.floats(1 - 2 * arrays.top(shifted, kind.width), kind.width)
    angle = arrays.floats(_within_half(arrays, kind, shifted) - quarter, kind.width)
    angle += 0.5
    angle *= kind.turn * 2.0**-kind.width
    square = angle * angle
    sine = _horner(kind.sin, square)
    sine *= angle
    sine *= sign
    sign *= _horner(kind.cos, square)
    return sign, sine


def _within_half(arrays: Arrays, kind: Format, words: Any) -> Any:
    if kind.width == 32:
        return arrays.signed(words & ((1 << 31) - 1), 32)
    return arrays.low(words, 63)
