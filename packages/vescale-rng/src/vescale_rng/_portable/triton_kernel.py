"""The Triton kernels of the portable policy: one lane computes a block, and stores what it owns.

The same operations in the same order as `maps` and `functions`, which the tests hold against
them bit by bit. They are compiled without contraction: no product is fused with a sum.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from vescale_rng._portable.functions import SINGLE

_ONE, _ROOT = tl.constexpr(SINGLE.one), tl.constexpr(SINGLE.root)
_LN2_HIGH, _LN2_LOW = map(tl.constexpr, SINGLE.ln2)
_ANGLE = tl.constexpr(SINGLE.turn * 2.0**-32)
# One name each: a kernel cannot read a tuple of its module.
_LOG3, _LOG2, _LOG1, _LOG0 = map(tl.constexpr, SINGLE.log)
_SIN6, _SIN5, _SIN4, _SIN3, _SIN2, _SIN1, _SIN0 = map(tl.constexpr, SINGLE.sin)
_COS7, _COS6, _COS5, _COS4, _COS3, _COS2, _COS1, _COS0 = map(tl.constexpr, SINGLE.cos)


@triton.jit
def _positive_uniform(word):
    return word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10


@triton.jit
def _minus_log(x):
    integers = x.to(tl.int32, bitcast=True) + (_ONE - _ROOT)
    exponents = (integers >> 23) - 127
    significands = ((integers & 0x7FFFFF) + _ROOT).to(tl.float32, bitcast=True)
    above = tl.div_rn(significands - 1.0, significands + 1.0)
    square = above * above
    series = ((square * _LOG3 + _LOG2) * square + _LOG1) * square + _LOG0
    series = series * square * above + above * 2.0
    powers = exponents.to(tl.float32)
    return 0.0 - (powers * _LN2_HIGH + (series + powers * _LN2_LOW))


@triton.jit
def _cos_sin(word):
    shifted = word + 0x40000000
    sign = 1.0 - 2.0 * (shifted >> 31).to(tl.float32)
    within = (shifted & 0x7FFFFFFF).to(tl.int32, bitcast=True) - 0x40000000
    angle = (within.to(tl.float32) + 0.5) * _ANGLE
    square = angle * angle
    cosine = ((square * _COS7 + _COS6) * square + _COS5) * square + _COS4
    cosine = (((cosine * square + _COS3) * square + _COS2) * square + _COS1) * square + _COS0
    sine = ((square * _SIN6 + _SIN5) * square + _SIN4) * square + _SIN3
    sine = ((sine * square + _SIN2) * square + _SIN1) * square + _SIN0
    return cosine * sign, sine * angle * sign


@triton.jit
def _normals(first, second, mean, std):
    radius = tl.sqrt_rn(_minus_log(_positive_uniform(first)) * 2.0)
    cosine, sine = _cos_sin(second)
    return cosine * radius * std + mean, sine * radius * std + mean


@triton.jit
def _value(word, a, b, KIND: tl.constexpr):
    """Return the value of one word: `a` and `b` are the map's numbers."""
    if KIND == "uniform":
        kept = (word & 0xFFFFFF).to(tl.int32, bitcast=True)
        return kept.to(tl.float32) * 5.9604644775390625e-08 * b + a
    elif KIND == "exponential":
        return tl.maximum(_minus_log(_positive_uniform(word)), 5.9604644775390625e-08) * a
    elif KIND == "bernoulli":
        # Both less 2**31, which maps 32 unsigned bits to a signed number.
        return ((word ^ 0x80000000).to(tl.int32, bitcast=True) <= a).to(tl.int32)
    else:
        return word.to(tl.int64) % b + a


@triton.jit
def _store(out, value, place, mask, high, low, EXCLUDED: tl.constexpr):
    if out.dtype.element_ty == tl.bfloat16:
        # To nearest, ties to even, by hand: the interpreter's own conversion truncates.
        value = value.to(tl.float32)
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    value = value.to(out.dtype.element_ty)
    if EXCLUDED:
        # Both bounds are values of the dtype: so is what stands here, which float32 holds exactly.
        value = value.to(tl.float32)
        value = tl.where(value == high, low, value).to(out.dtype.element_ty)
    tl.store(out + place, value, mask=mask)


_NUMBERS = [
    *("first", "runs", "run_blocks", "length", "n1", "n2", "g0", "g1", "g2"),
    *("l0", "l1", "l2", "l3", "a", "b", "high", "low"),
]


@triton.jit(do_not_specialize=_NUMBERS)
def fill_tile(
    out,
    key,
    first,
    runs,
    run_blocks,
    length,
    n1,
    n2,
    g0,
    g1,
    g2,
    l0,
    l1,
    l2,
    l3,
    a,
    b,
    high,
    low,
    KIND: tl.constexpr,
    EXCLUDED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Fill a grid of `runs` runs of `length` elements, each covered by `run_blocks` blocks.

    The grid has three outer dims, of which `n1` and `n2` are the extents of the last two; it
    begins at the place `first` of global memory and at `out`. `g` are its strides there,
    `l` those in local memory, of which `l3` is that of a run. `key` is an int64 in memory.
    `a` and `b` are the numbers of the map KIND, `high` and `low` what `Map` says of
    `excluded`. A program has LANES blocks.
    """
    # 64 bits: places in a tensor may not fit in 32.
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    run = lane // run_blocks
    i2 = run % n2
    i1 = (run // n2) % n1
    i0 = run // n2 // n1
    start = first + i0 * g0 + i1 * g1 + i2 * g2
    place = i0 * l0 + i1 * l1 + i2 * l2
    block = start // 4 + lane % run_blocks
    bits = tl.load(key)
    lower = (block & 0xFFFFFFFF).to(tl.uint32)
    upper = (block >> 32).to(tl.uint32)
    # A fill's stream is 0, as in `TileBlocks.words`: the upper half of the counter.
    zero = lower * 0
    words = tl.philox(bits.to(tl.uint64, bitcast=True), lower, upper, zero, zero)
    if KIND == "normal":
        v0, v1 = _normals(words[0], words[1], a, b)
        v2, v3 = _normals(words[2], words[3], a, b)
    else:
        v0 = _value(words[0], a, b, KIND)
        v1 = _value(words[1], a, b, KIND)
        v2 = _value(words[2], a, b, KIND)
        v3 = _value(words[3], a, b, KIND)
    # Where the block's first element is in its run: negative before its beginning.
    inside = block * 4 - start
    held = run < runs
    for lane in tl.static_range(4):
        value = v0 if lane == 0 else (v1 if lane == 1 else (v2 if lane == 2 else v3))
        mask = held & (inside + lane >= 0) & (inside + lane < length)
        _store(out, value, place + (inside + lane) * l3, mask, high, low, EXCLUDED)
