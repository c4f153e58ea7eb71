"""Makes numbers of random words by the arithmetic of curand and ATen, step by step.

Where nvcc contracts a product and a sum of ATen's, and the product is rounded, `fma` is written:
the interpreter then rounds once as well.
Sources: curand_uniform.h, curand_normal.h, ATen/core/TransformationHelper.h and
ATen/native/cuda/DistributionTemplates.h. CUDA.md says the same in words.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from vescale_rng._cuda.kernels.math import (
    ceil,
    converted,
    cospi,
    divide,
    exp,
    fast_cos,
    fast_exp,
    fast_log,
    fast_sin,
    fast_tan,
    fma,
    log,
    sinpi,
    sqrt,
    tan,
)
from vescale_rng._cuda.kernels.words import pick


@triton.jit
def unit(words, lane, DOUBLE: tl.constexpr):
    """Make a uniform in (0, 1]: 32 bits in fp32, 53 bits in fp64."""
    if DOUBLE:
        # As curand joins them: the first word, and the second one moved up so that 53 bits are
        # filled.
        return unit53(pair(words, lane, 21, True))
    else:
        return unit32(pick(words, lane))


@triton.jit
def unit32(word):
    # A product with a power of two is exact: no rounding but that of the sum.
    return word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10


@triton.jit
def unit53(bits):
    return bits.to(tl.float64) * 1.1102230246251565e-16 + 5.551115123125783e-17


@triton.jit
def pair(words, lane, SHIFT: tl.constexpr, SECOND_UP: tl.constexpr):
    """Join two words to 64 bits: one of them moved up by SHIFT."""
    first = tl.where(lane == 0, words[0], words[2]).to(tl.uint64)
    second = tl.where(lane == 0, words[1], words[3]).to(tl.uint64)
    if SECOND_UP:
        return first ^ (second << SHIFT)
    else:
        return (first << SHIFT) | second


@triton.jit
def gauss(words, lane, DOUBLE: tl.constexpr):
    """Compute Box-Muller: the sine of a pair on even lanes, its cosine on odd ones."""
    if DOUBLE:
        radius = sqrt(log(unit53(pair(words, lane * 0, 21, True))) * -2.0)
        bits = pair(words, lane * 0 + 1, 21, True).to(tl.float64)
        turn = bits * 2.220446049250313e-16 + 1.1102230246251565e-16
        sine, cosine = sinpi(turn), cospi(turn)
    else:
        first = lane & 2
        radius = sqrt(log(unit32(pick(words, first))) * -2.0)
        # 2 * pi * 2**-32 and half of it, as fp32.
        y = pick(words, first | 1).to(tl.float32)
        angle = scaled(y, 1.4629180792671596e-09, 7.314590396335798e-10)
        sine, cosine = fast_sin(angle), fast_cos(angle)
    return tl.where(lane & 1 == 0, sine, cosine) * radius


@triton.jit
def real(bits, DOUBLE: tl.constexpr):
    """Return a parameter in the type of the arithmetic, from the bits of an fp64."""
    value = bits.to(tl.float64, bitcast=True)
    if DOUBLE:
        return value
    else:
        return value.to(tl.float32)


@triton.jit
def scaled(value, factor, shift):
    return fma(value, factor + tl.zeros_like(value), shift + tl.zeros_like(value))


@triton.jit
def uniform(u, low, span, high, out: tl.constexpr):
    """Scale to [low, high): the upper bound is replaced where rounding to the dtype ends on it."""
    value = converted(scaled(u, span, low), out).to(u.dtype)
    return tl.where(value == high, low, value)


@triton.jit
def exponential(u, minus_mean, DOUBLE: tl.constexpr):
    # The logarithm of 1 and its neighbour is replaced by -eps / 2. As a difference, which is
    # exact there: a literal that is compared with would be rounded to fp32.
    if DOUBLE:
        logarithm = tl.where(1.0 - u <= 1.1102230246251565e-16, -1.1102230246251565e-16, log(u))
    else:
        logarithm = tl.where(1.0 - u <= 5.960464477539063e-08, -5.960464477539063e-08, fast_log(u))
    return minus_mean * logarithm


@triton.jit
def geometric(u, p):
    return ceil(divide(fast_log(u), fast_log(1.0 - p + tl.zeros_like(u))))


@triton.jit
def cauchy(u, median, sigma, DOUBLE: tl.constexpr):
    if DOUBLE:
        tangent = tan((u - 0.5) * 3.141592653589793)
    else:
        # Kept away from the poles by eps on both sides.
        u = tl.where(u > 0.9999998807907104, 0.9999998807907104, u)
        u = tl.where(u < 1.1920928955078125e-07, 1.1920928955078125e-07, u)
        tangent = fast_tan((u - 0.5) * 3.1415927410125732)
    return scaled(tangent, sigma, median)


@triton.jit
def modulo(words, lane, span, base, BITS64: tl.constexpr):
    """Return an integer in [base, base + span) by the remainder, as int64."""
    if BITS64:
        rest = pair(words, lane, 32, False) % span.to(tl.uint64, bitcast=True)
    else:
        rest = (pick(words, lane) % span.to(tl.uint32)).to(tl.uint64)
    return rest.to(tl.int64, bitcast=True) + base


@triton.jit
def at_most(words, lane, p):
    """Return 1 where a uniform number is at most the probability of its element."""
    return (unit(words, lane, False) <= p).to(tl.int32)


@triton.jit
def draw(
    KIND: tl.constexpr,
    words,
    lane,
    a,
    b,
    c,
    out: tl.constexpr,
    DOUBLE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Return the number of KIND; a, b and c are its parameters as 64-bit integers."""
    p, q = real(a, DOUBLE), real(b, DOUBLE)
    if KIND == "modulo":
        return modulo(words, lane, a, b, UNROLL == 2)
    elif KIND == "normal":
        return scaled(gauss(words, lane, DOUBLE), q, p)
    elif KIND == "log_normal":
        value = scaled(gauss(words, lane, DOUBLE), q, p)
        if DOUBLE:
            return exp(value)
        else:
            return fast_exp(value)
    else:
        u = unit(words, lane, DOUBLE)
        if KIND == "uniform":
            return uniform(u, p, q, real(c, DOUBLE), out)
        elif KIND == "bernoulli":
            return (u < p).to(tl.int32)
        elif KIND == "exponential":
            return exponential(u, p, DOUBLE)
        elif KIND == "geometric":
            return geometric(u, p)
        else:
            tl.static_assert(KIND == "cauchy")
            return cauchy(u, p, q, DOUBLE)
