"""Property: the published vectors are what is drawn, and what SPEC.md says by itself.

The reader below is written from SPEC.md alone: no torch, none of our code.
"""

import importlib.util
import json
from math import ceil, factorial, pi
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "vectors"
VECTORS = json.loads((FOLDER / "portable.json").read_text())

# --- The reader: one element of one tensor


def philox(key, counter):
    c, k = [counter >> 32 * i & 0xFFFFFFFF for i in range(4)], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def positive(F, w):
    if F is np.float32:
        return F(w) * F(2.0**-32) + F(2.0**-33)
    return F(w >> 32) * F(2.0**-32) + (F(w & 0xFFFFFFFF) * F(2.0**-64) + F(2.0**-65))


def series(F, coefficients, x):
    value = x * F(coefficients[-1])
    for c in coefficients[-2:0:-1]:
        value = (value + F(c)) * x
    return value + F(coefficients[0])


def minus_log(F, x):
    significand, exponent = np.frexp(x)
    if significand < F(0.5**0.5):
        significand, exponent = significand * F(2), exponent - 1
    s = (significand - F(1)) / (significand + F(1))
    terms, bits = (4, 12) if F is np.float32 else (11, 41)
    tail = series(F, [2 / (2 * k + 3) for k in range(terms)], s * s) * (s * s) * s + s * F(2)
    upper = int(0.6931471805599453 * 2**bits) / 2**bits
    lower = 0.6931471805599453 - upper + 2.3190468138462996e-17
    return F(0) - (F(exponent) * F(upper) + (tail + F(exponent) * F(lower)))


def cos_sin(F, w, bits):
    half, rest = divmod((w + 2 ** (bits - 2)) % 2**bits, 2 ** (bits - 1))
    angle = (F(rest - 2 ** (bits - 2)) + F(0.5)) * F(F(2 * pi) * F(2.0**-bits))
    sines, cosines = (7, 8) if F is np.float32 else (12, 12)
    square, sign = angle * angle, F(1 - 2 * half)
    sine = series(F, [(-1) ** k / factorial(2 * k + 1) for k in range(sines)], square)
    cosine = series(F, [(-1) ** k / factorial(2 * k) for k in range(cosines)], square)
    return cosine * sign, sine * angle * sign


def element(name, p, dtype, key, i):
    """The value of element i, in float32 or float64, or as an integer."""
    F = np.float64 if dtype == "float64" else np.float32
    bits = 64 if F is np.float64 and name not in ("Bernoulli", "RandInt") else 32
    if name == "RandInt":
        bits = 64 if p["high"] - p["low"] >= 2**28 else 32
    block = philox(key, i // (128 // bits))
    words = block if bits == 32 else [block[0] << 32 | block[1], block[2] << 32 | block[3]]
    at = i % len(words)
    if name == "Bernoulli":
        return int(words[at] < ceil(p["p"] * 2**32))
    if name == "RandInt":
        return words[at] % (p["high"] - p["low"]) + p["low"]
    if name == "Uniform":
        digits = 24 if F is np.float32 else 53
        u = F(words[at] % 2**digits) * F(2.0**-digits)
        return u * F(F(p["high"]) - F(p["low"])) + F(p["low"])
    if name == "Exponential":
        least = F(2.0**-24 if F is np.float32 else 2.0**-53)
        return max(minus_log(F, positive(F, words[at])), least) * F(1 / p["rate"])
    radius = np.sqrt(minus_log(F, positive(F, words[at & ~1])) * F(2))
    return cos_sin(F, words[at | 1], bits)[at & 1] * radius * F(p["std"]) + F(p["mean"])


# --- What it is held against

READABLE = ("Uniform", "Normal", "Exponential", "Bernoulli", "RandInt")


def bits_of(value, dtype):
    if dtype == "bfloat16":
        number = int(np.float32(value).view(np.uint32))
        return f"{(number + 0x7FFF + (number >> 16 & 1)) >> 16:04x}"
    kind = np.dtype(dtype)
    return f"{int(kind.type(value).view(f'u{kind.itemsize}')):0{2 * kind.itemsize}x}"


@pytest.mark.parametrize("case", VECTORS["distributions"])
def test_a_reader_of_the_specification_finds_the_same_numbers(case):
    if case["distribution"] not in READABLE:
        return
    key, start = int(case["key"], 16), case["start"]
    for offset, expected in enumerate(case["bits"]):
        value = element(
            case["distribution"], case["parameters"], case["dtype"], key, start + offset
        )
        assert bits_of(value, case["dtype"]) == expected


@pytest.mark.parametrize("case", VECTORS["philox"])
def test_the_reader_finds_the_same_words(case):
    words = philox(int(case["key"], 16), int(case["counter"], 16))
    assert [f"{word:08x}" for word in words] == case["words"]


@pytest.mark.parametrize("case", VECTORS["keys"])
def test_numpys_mersenne_twister_finds_the_same_keys(case):
    stream = np.random.RandomState(case["seed of mt19937"])
    first, second = (int(stream.randint(0, 2**32, dtype=np.uint64)) for _ in "12")
    assert f"{first << 32 | second:016x}" == case["key"]


@pytest.mark.parametrize("case", VECTORS["permutations"])
def test_the_reader_finds_the_same_permutations(case):
    key = int(case["key"], 16)
    words = [philox(key, i // 2)[i % 2 * 2 :][:2] for i in range(case["n"])]
    assert sorted(range(case["n"]), key=words.__getitem__) == case["permutation"]


@pytest.mark.parametrize("case", VECTORS["samples"])
def test_the_reader_finds_the_same_samples(case):
    races = 3 if case["replacement"] else 1
    for row, weights in enumerate(case["weights"]):
        won = []
        for race in range(races):
            first = (row * races + race) * len(weights)
            times = [
                element("Exponential", {"rate": 1.0}, "float32", int(case["key"], 16), first + c)
                / np.float32(weight)
                if weight
                else np.inf
                for c, weight in enumerate(weights)
            ]
            won += sorted(range(len(weights)), key=times.__getitem__)[: 3 // races]
        assert won == case["samples"][row]


def test_the_file_is_what_is_drawn_today():
    spec = importlib.util.spec_from_file_location("vectors_generate", FOLDER / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (FOLDER / "portable.json").read_text() == generate.text()


def test_every_part_has_vectors():
    names = {case["distribution"] for case in VECTORS["distributions"]}
    assert names > {*READABLE}
    assert all(len(VECTORS[part]) for part in VECTORS)
