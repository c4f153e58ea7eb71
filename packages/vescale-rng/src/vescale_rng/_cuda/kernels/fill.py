"""The kernel that fills one span of a local tensor: every element by itself.

A span is up to four dims of a box. Of the places that change from call to call none is compiled
in, so that neither a seed nor a shape costs a compilation; the map and the arithmetic are.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from vescale_rng._cuda.kernels.math import converted
from vescale_rng._cuda.kernels.transforms import at_most, draw
from vescale_rng._cuda.kernels.words import grid_stride, quads, vectors, wide

# As nvcc compiles ATen: products and sums are contracted, which the logarithm of fp64 relies on;
# nothing is flushed to zero.
OPTIONS = {"enable_fp_fusion": True, "enable_reflect_ftz": False}

_POINTERS = ["local", "given", "seed_memory", "offset_memory"]
_VALUES = [
    *("seed_low", "seed_high", "counter_low", "counter_high", "a_low", "a_high"),
    *("b_low", "b_high", "c_low", "c_high", "first_low", "first_high", "limit", "count"),
    *("n1", "n2", "n3", "g0", "g1", "g2", "g3", "l0", "l1", "l2", "l3"),
]


@triton.jit
def words_of_element(
    index,
    seed,
    counter,
    MAP: tl.constexpr,
    THREADS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Return the block and the lane of each element, by the map of the op."""
    if MAP == "vectors":
        return vectors(index, seed, counter, THREADS, UNROLL)
    elif MAP == "quads":
        return quads(index, seed, counter)
    else:
        return grid_stride(index, seed, counter, THREADS, UNROLL)


# Nor is the alignment of a pointer: a capture must not meet a tensor that needs another kernel.
@triton.jit(do_not_specialize=_VALUES, do_not_specialize_on_alignment=_POINTERS)
def fill_span(
    local,
    given,
    seed_memory,
    offset_memory,
    seed_low,
    seed_high,
    counter_low,
    counter_high,
    a_low,
    a_high,
    b_low,
    b_high,
    c_low,
    c_high,
    first_low,
    first_high,
    limit,
    count,
    n1,
    n2,
    n3,
    g0,
    g1,
    g2,
    g3,
    l0,
    l1,
    l2,
    l3,
    KIND: tl.constexpr,
    MAP: tl.constexpr,
    THREADS: tl.constexpr,
    UNROLL: tl.constexpr,
    DOUBLE: tl.constexpr,
    WIDE: tl.constexpr,
    FROM_MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill `count` elements of `local`; see `launch` for what the arguments hold."""
    integer: tl.constexpr = tl.int64 if WIDE else tl.int32
    i = tl.program_id(0).to(integer) * BLOCK + tl.arange(0, BLOCK)
    held = i < count
    i3, i = i % n3, i // n3
    i2, i = i % n2, i // n2
    i1, i0 = i % n1, i // n1
    place = i0 * l0 + i1 * l1 + i2 * l2 + i3 * l3
    index = i0 * g0 + i1 * g1 + i2 * g2 + i3 * g3 + wide(first_low, first_high).to(integer)
    # Elements of other segments of the same op are filled by other launches.
    held = held & (index >= 0) & (index < limit)
    seed, counter = wide(seed_low, seed_high), wide(counter_low, counter_high)
    if FROM_MEMORY:
        # What a captured graph must not freeze is read when it runs.
        seed = tl.load(seed_memory)
        counter += tl.load(offset_memory) // 4
    words, lane = words_of_element(index, seed, counter, MAP, THREADS, UNROLL)
    if KIND == "at_most":
        value = at_most(words, lane, tl.load(given + place, mask=held, other=0))
    else:
        a, b, c = wide(a_low, a_high), wide(b_low, b_high), wide(c_low, c_high)
        out: tl.constexpr = local.dtype.element_ty
        value = draw(KIND, words, lane, a, b, c, out, DOUBLE, UNROLL)
    tl.store(local + place, converted(value, local.dtype.element_ty), mask=held)
