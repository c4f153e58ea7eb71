"""ATen's random kernels on CUDA, played in numpy: launch by launch, thread by thread.

Written from the kernels' structure (a grid of blocks, a loop over turns, a block of four words at
a time), not from the closed formula that the package uses, so that the two check each other.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from vescale_rng import (
    Bernoulli,
    Cauchy,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Random,
    Uniform,
)
from vescale_rng._cuda.bernoulli import EachOf
from vescale_rng._cuda.philox import philox4x32

DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def blocks(seed, offset, thread):
    """curand: the four words that a thread draws at an offset; arrays of threads will do."""
    counter = offset // 4
    key = (seed & 0xFFFFFFFF, seed >> 32)
    return np.stack(philox4x32((counter & 0xFFFFFFFF, counter >> 32, thread, 0), key), -1)


def fits(numel, itemsize):
    """Whether a launch can index a dense tensor with 32 bits."""
    return numel <= 2**31 - 1 and 1 + (numel - 1) * itemsize <= 2**31 - 1


def launches(numel, itemsize, unroll, most, offset):
    """(elements, offset) of every launch of a nullary kernel; the offset after it is the last."""

    def reserve(count):
        grid = min(most // 256, -(-count // 256))
        return ((count - 1) // (256 * grid * unroll) + 1) * 4

    pending = [numel] if numel else []
    if numel and not fits(numel, itemsize):
        # The place of the whole is taken before it is split, and not used.
        offset += reserve(numel)
    while pending:
        # A stack, as in TensorIterator: the first half on top.
        count = pending.pop()
        if not fits(count, itemsize):
            pending += [count - count // 2, count // 2]
            continue
        yield count, offset
        offset += reserve(count)
    yield 0, offset


def nullary(numel, itemsize, unroll, most, seed, offset, words_of):
    """All values of a nullary kernel, launch by launch, and the offset after it."""
    *each, (_, end) = launches(numel, itemsize, unroll, most, offset)
    return [launch(count, unroll, most, seed, at, words_of) for count, at in each], end


def launch(numel, unroll, most, seed, offset, words_of):
    """The values of one launch."""
    grid = min(most // 256, -(-numel // 256))
    threads = np.arange(256 * grid)
    chunks = []
    for turn in range(-(-numel // (256 * grid * unroll))):
        values = words_of(blocks(seed, offset + 4 * turn, threads))
        # Lane by lane: each lies a grid's width behind the one before.
        chunks += [values[:, lane] for lane in range(unroll)]
    return torch.cat(chunks)[:numel]


def fused(a, b, c):
    """a * b + c, rounded once, for fp32 (products are exact in fp64, sums made odd)."""
    product = np.float64(a) * np.float64(b)
    total = product + np.float64(c)
    # Two-sum: where fp64 rounded, the last bit is made odd, so that fp32 does not round a tie.
    back = total - product
    error = (product - (total - back)) + (np.float64(c) - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    toward = np.where((error > 0) == (total > 0), bits + 1, bits - 1)
    return np.where(inexact, toward, bits).view(np.float64).astype(np.float32)


def uniform32(words):
    return (words.astype(np.float32).astype(np.float64) * 2**-32 + 2**-33).astype(np.float32)


def bits53(first, second):
    return first.astype(np.uint64) ^ (second.astype(np.uint64) << np.uint64(21))


def uniform64(words):
    x = bits53(words[:, 0::2], words[:, 1::2])
    return x.astype(np.float64) * 2**-53 + 2**-54


def normal32(words):
    u = uniform32(words[:, 0::2])
    y = words[:, 1::2].astype(np.float32)
    angle = fused(y, np.float32(2 * math.pi * 2**-32), np.float32(math.pi * 2**-32))
    radius = np.sqrt(np.float32(-2) * np.log(u))
    pair = np.stack([np.sin(angle) * radius, np.cos(angle) * radius], -1)
    return pair.reshape(len(words), 4)


def normal64(words):
    u, x = uniform64(words)[:, :1], bits53(words[:, 2:3], words[:, 3:4]).astype(np.float64)
    turn = (x * 2**-52 + 2**-53) * math.pi
    radius = np.sqrt(-2 * np.log(u))
    return np.concatenate([np.sin(turn) * radius, np.cos(turn) * radius], 1)


def words64(words):
    pairs = words.astype(np.uint64)
    return pairs[:, 0::2] << np.uint64(32) | pairs[:, 1::2]


def as_dtype(values, dtype):
    """numpy values in a torch dtype, by way of fp32 for the 16-bit ones."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.to(dtype)


def scaled(values, factor, shift):
    """values * factor + shift as the device contracts it."""
    if values.dtype == np.float64:
        return values * factor + shift
    return fused(values, np.float32(factor), np.float32(shift))


def transform(distribution, dtype):
    """(elements per block, what words become) of a distribution on a dtype."""
    double = dtype == torch.float64
    unroll = 2 if double else 4
    real = np.float64 if double else np.float32
    unit = uniform64 if double else uniform32
    gauss = normal64 if double else normal32
    eps = np.finfo(real).eps
    match distribution:
        case Uniform(low, high):
            low, high = torch.tensor(low, dtype=dtype), torch.tensor(high, dtype=dtype)
            span = (high - low).item()

            def uniform(words):
                values = as_dtype(scaled(unit(words), span, low.item()), dtype)
                return torch.where(values == high, low, values)

            return unroll, uniform
        case Normal(mean, std):
            return unroll, lambda words: as_dtype(scaled(gauss(words), std, mean), dtype)
        case LogNormal(mean, std):
            return unroll, lambda words: as_dtype(np.exp(scaled(gauss(words), std, mean)), dtype)
        case Bernoulli(p):
            return unroll, lambda words: as_dtype(unit(words) < real(p), dtype)
        case Exponential(rate):

            def exponential(words):
                u = unit(words)
                logarithm = np.where(u >= 1 - eps / 2, -eps / 2, np.log(u))
                return as_dtype(real(-1) / real(rate) * logarithm, dtype)

            return unroll, exponential
        case Geometric(p):
            down = np.log1p(real(-p)) if double else np.log(real(1) - real(p))
            return unroll, lambda words: as_dtype(np.ceil(np.log(unit(words)) / down), dtype)
        case Cauchy(median, sigma):

            def cauchy(words):
                u = unit(words) if double else np.clip(unit(words), eps, real(1) - eps)
                return as_dtype(
                    scaled(np.tan(real(math.pi) * (u - real(0.5))), sigma, median), dtype
                )

            return unroll, cauchy
        case RandInt(low, high):
            high = beyond(dtype) if high is None else high
            return remainder(high - low, low, dtype, high - low >= 2**28)
        case Random():
            return remainder(beyond(dtype), 0, dtype, dtype in (torch.float64, torch.int64))
    raise NotImplementedError(distribution)


def beyond(dtype):
    """One more than the greatest integer that `random_()` draws."""
    if dtype == torch.bool:
        return 2
    return 2 ** DIGITS[dtype] + 1 if dtype in DIGITS else torch.iinfo(dtype).max + 1


def remainder(span, base, dtype, two_words):
    def modulo(words):
        values = words64(words) if two_words else words.astype(np.uint64)
        values = (values % np.uint64(span)).astype(np.int64) + np.int64(base)
        return as_dtype(values, dtype)

    return (2 if two_words else 4), modulo


def vector_of(given, widest):
    """The vector that the dropout kernel takes of a tensor."""
    vector = widest
    while given.numel() % vector:
        vector //= 2
    return vector


def kept(given, p, widest, most, seed, offset):
    """What the fused dropout kernel keeps of a dense tensor, in its memory order."""
    numel, vector = given.numel(), vector_of(given, widest)
    keep = 1.0 - p if given.dtype == torch.float64 else np.float32(1.0 - p)
    grid = min(most // 256, -(-numel // 256))
    threads = np.arange(256 * grid)
    if vector == 1:
        taken = ((numel - 1) // (256 * grid * 4) + 1) * 4
        mask = launch(
            numel, 4, most, seed, offset, lambda words: torch.from_numpy(uniform32(words) < keep)
        )
        # It goes through the elements by their indices, not by their places in memory.
        whole = torch.empty_like(given, dtype=torch.bool).copy_(mask.view(given.shape))
        return whole.as_strided((numel,), (1,)), offset + taken
    chunks = []
    turns = -(-numel // (256 * grid * vector))
    for turn in range(turns):
        at = offset + 4 * turn * max(1, vector // 4)
        numbers = [uniform32(blocks(seed, at + 4 * k, threads)) for k in range(-(-vector // 4))]
        chunks.append(np.concatenate(numbers, 1)[:, :vector].reshape(-1))
    taken = ((numel - 1) // (256 * grid * 4) + 1) * 4
    return torch.from_numpy(np.concatenate(chunks)[:numel] < keep), offset + taken


def each_of(p, most, seed, offset):
    """What `bernoulli_` with a tensor of probabilities draws, row-major."""
    flat = p.reshape(-1)
    threads = np.arange(-(-flat.numel() // 4))
    numbers = torch.from_numpy(uniform32(blocks(seed, offset, threads))).reshape(-1)
    return numbers[: flat.numel()] <= flat, offset + 12


@dataclass
class ModelDevice:
    """A GPU of a few threads, played in numpy; its tensors are on CPU."""

    threads: int = 512
    drawn: int = 0

    @property
    def device(self):
        """`Drawer.device`."""
        return torch.device("cpu")

    def draw(self, distribution, out, place):
        """`Drawer.draw`: memory order, as TensorIterator goes through a dense tensor."""
        self.drawn += out.numel()
        flat = out.as_strided((out.numel(),), (1,), out.storage_offset())
        if isinstance(distribution, EachOf):
            values, offset = each_of(distribution.p, self.threads, place.seed, place.offset)
            out.copy_(values.view(out.shape))
            return offset
        unroll, words_of = transform(distribution, out.dtype)
        values, offset = nullary(
            out.numel(), out.element_size(), unroll, self.threads, place.seed, place.offset,
            words_of,
        )  # fmt: skip
        if values:
            flat.copy_(torch.cat(values))
        return offset

    def dropout(self, given, p, place):
        """`Drawer.dropout`."""
        widest = 16 // given.element_size()
        mask, _ = kept(given, p, widest, self.threads, place.seed, place.offset)
        self.drawn += given.numel()
        whole = torch.empty_like(given, dtype=torch.bool)
        whole.as_strided((given.numel(),), (1,)).copy_(mask)
        return whole
