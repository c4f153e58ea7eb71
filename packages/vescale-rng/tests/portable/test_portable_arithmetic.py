"""Property: numpy and torch turn words into the same bytes, and these are the right numbers."""

from math import pi

import numpy as np
import pytest
import torch
from portable_cases import ANSWERS, EVERY, KEY, as_signed, edges, philox, same
from vescale_rng import (
    Bernoulli,
    Cauchy,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Uniform,
    _portable,
    whole,
)
from vescale_rng._portable.functions import DOUBLE, SINGLE, cos_sin, exp, minus_log
from vescale_rng._portable.maps import map_of
from vescale_rng._portable.numpy_arrays import NumpyArrays
from vescale_rng._portable.torch_arrays import TorchArrays

NUMPY, TORCH = NumpyArrays(), TorchArrays(torch.device("cpu"))


@pytest.mark.parametrize(("counter", "key", "words"), ANSWERS)
def test_philox_gives_the_published_answers(counter, key, words):
    expected = [int(word, 16) for word in words.split()]
    block, stream = counter % (1 << 64), counter >> 64
    signed = np.array([block], np.uint64).view(np.int64)
    found = NUMPY.words(key, signed, stream)
    assert NUMPY.in_order(found).tolist() == [expected]
    found = TORCH.words(as_signed(key), torch.from_numpy(signed), stream)
    assert TORCH.in_order(found).tolist() == [expected]
    assert philox(key, counter) == expected


def test_both_make_the_same_words_of_many_blocks_and_streams():
    blocks = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 500)
    for stream in (0, 1, 2**32, 2**64 - 1):
        for name in ("words", "wide_words"):
            first = getattr(NUMPY, name)(KEY, blocks, stream)
            second = getattr(TORCH, name)(as_signed(KEY), torch.from_numpy(blocks), stream)
            ints = first.astype(np.int64) if name == "words" else first.view(np.int64)
            assert np.array_equal(ints, second.numpy())
    words = philox(KEY, (2**64 - 1 << 64) + int(blocks[7]) % 2**64)
    assert first[:, 7].tolist() == [words[0] << 32 | words[1], words[2] << 32 | words[3]]


@pytest.mark.parametrize(("distribution", "dtype"), EVERY)
def test_maps_agree_on_every_edge(distribution, dtype):
    kind = map_of(distribution, dtype)
    words = edges()
    if kind.wide:
        words = words[0].astype(np.uint64) << np.uint64(32) | words[1]
        theirs = torch.from_numpy(words.view(np.int64))
    else:
        theirs = torch.from_numpy(words.astype(np.int64))
    found = torch.from_numpy(np.ascontiguousarray(kind.of(NUMPY, words)))
    assert same(found, kind.of(TORCH, theirs))
    for arrays, values in ((NUMPY, found.numpy()), (TORCH, found)):
        ordered = torch.as_tensor(arrays.in_order(values))
        assert same(ordered, found.permute(*reversed(range(found.ndim))).reshape(ordered.shape))


def ulps(found, exact, kind):
    unit = np.spacing(np.maximum(np.abs(exact), np.finfo(found.dtype).tiny).astype(found.dtype))
    return float(np.max(np.abs(found.astype(np.longdouble) - exact) / unit.astype(np.longdouble)))


@pytest.mark.parametrize("kind", [SINGLE, DOUBLE])
def test_functions_are_right_to_two_units(kind):
    dtype = np.float32 if kind is SINGLE else np.float64
    uniform = np.random.default_rng(2).random(200_000)
    x = np.concatenate([uniform, uniform * 2.0**-30, 1 - uniform * 1e-3, [1.0, 2.0**-33]])
    x = x[x > 0].astype(dtype)
    found = minus_log(NUMPY, kind, x)
    assert ulps(found, -np.log(x.astype(np.longdouble)), kind) <= 2
    assert found[-2] == 0
    assert not np.signbit(found[-2])
    x = (uniform * (kind.span[1] - kind.span[0] - 40) + kind.span[0] + 18).astype(dtype)
    assert ulps(exp(NUMPY, kind, x), np.exp(x.astype(np.longdouble)), kind) <= 2
    word = np.uint32 if kind is SINGLE else np.uint64
    words = np.concatenate([edges().reshape(-1), np.arange(100)]).astype(word)
    words = words << word(kind.width - 32) | words
    turns = (words.astype(np.longdouble) + 0.5) / 2.0**kind.width
    cosine, sine = cos_sin(NUMPY, kind, words)
    unit = np.spacing(dtype(1))
    two_pi = 2 * np.longdouble("3.14159265358979323846264338327950288")
    assert np.abs(cosine - np.cos(two_pi * turns)).max() <= 2 * unit
    assert np.abs(sine - np.sin(two_pi * turns)).max() <= 2 * unit


def test_exp_ends_in_infinity_and_zero():
    for kind, dtype in ((SINGLE, np.float32), (DOUBLE, np.float64)):
        x = np.array([1e9, -1e9, np.inf, -np.inf, np.nan, 0.0], dtype)
        with np.errstate(all="ignore"):
            found = exp(NUMPY, kind, x)
        assert np.array_equal(found, [np.inf, 0, np.inf, 0, np.nan, 1], True)


def sample(distribution, dtype, n=400_000):
    out = torch.empty(n, dtype=dtype)
    _portable.fill_portable(out, distribution, whole((n,)), KEY)
    return out.double().numpy()


def normal_cdf(x):
    return 0.5 * (1 + torch.erf(torch.from_numpy(x) / 2**0.5).numpy())


# Each with its cumulative distribution; a geometric one between its steps.
LAWS = [
    (Uniform(-2.0, 3.0), lambda x: (x + 2) / 5),
    (Normal(1.0, 2.0), lambda x: normal_cdf((x - 1) / 2)),
    (LogNormal(0.5, 1.5), lambda x: normal_cdf((np.log(x) - 0.5) / 1.5)),
    (Exponential(2.5), lambda x: -np.expm1(-2.5 * x)),
    (Cauchy(1.0, 3.0), lambda x: 0.5 + np.arctan((x - 1) / 3) / pi),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("distribution", "law"), LAWS)
def test_values_have_their_distribution(distribution, law, dtype):
    x = np.sort(sample(distribution, dtype))
    places = (np.arange(len(x)) + 0.5) / len(x)
    # Kolmogorov-Smirnov: farther apart than this is one case in a million.
    assert np.abs(law(x) - places).max() < 2.7 / len(x) ** 0.5


def test_counts_have_their_distribution():
    n = 400_000
    for p in (1e-4, 0.3, 0.999):
        for dtype in (torch.bool, torch.float64):
            assert abs(sample(Bernoulli(p), dtype).mean() - p) < 5 * (p / n) ** 0.5
    for low, high in ((-3, 9), (0, 7), (0, 1)):
        counts = np.unique(sample(RandInt(low, high), torch.int64), return_counts=True)
        assert counts[0].tolist() == list(range(low, high))
        mean = n / (high - low)
        assert np.abs(counts[1] - mean).max() < 5 * mean**0.5 + 1
    for dtype in (torch.float32, torch.int64):
        values, counts = np.unique(sample(Geometric(0.25), dtype), return_counts=True)
        expected = n * 0.25 * 0.75 ** (values - 1)
        assert values[0] == 1
        assert np.abs(counts - expected)[:20].max() < 5 * expected[0] ** 0.5


def test_pairs_of_normals_are_not_correlated():
    x = sample(Normal(), torch.float32).reshape(-1, 4)
    correlation = np.corrcoef(x.T) - np.eye(4)
    assert np.abs(correlation).max() < 5 / len(x) ** 0.5
    assert np.abs(np.corrcoef((x**2).T) - np.eye(4)).max() < 5 / len(x) ** 0.5


def test_small_types_are_float32_rounded():
    for dtype in (torch.bfloat16, torch.float16):
        for distribution in (Normal(), Exponential(), LogNormal(), Cauchy()):
            wide = torch.empty(5000)
            narrow = torch.empty(5000, dtype=dtype)
            _portable.fill_portable(wide, distribution, whole((5000,)), KEY)
            _portable.fill_portable(narrow, distribution, whole((5000,)), KEY)
            assert same(wide.to(dtype), narrow)
        assert sample(Uniform(), dtype).max() < 1


@pytest.mark.filterwarnings("ignore:to - 1 is out of bounds")
def test_integers_that_a_float_rounds_stay_below_the_bound():
    for dtype, high in ((torch.float16, 2**12), (torch.float32, 2**28), (torch.bfloat16, 2**9)):
        for distribution in (RandInt(0, high), RandInt(high // 2 + 1, high)):
            x = sample(distribution, dtype)
            least = torch.tensor(distribution.low, dtype=dtype).item()
            assert least <= x.min() <= x.max() < high
