"""What the portable policy draws: distributions with dtypes, and words that are easily wrong."""

import numpy as np
import torch
from rng_cases import FLOAT_DISTRIBUTIONS, OTHERS
from rng_pieces import FLOATS
from vescale_rng import Bernoulli, LogNormal, Normal, RandInt, Uniform

KEY = 0x8C7F0AAC97C4AA2F

EVERY = [
    *((distribution, dtype) for distribution in FLOAT_DISTRIBUTIONS for dtype in FLOATS),
    *OTHERS,
    (Bernoulli(0.0), torch.bool),
    (Bernoulli(1.0), torch.float32),
    (Bernoulli(2.0**-40), torch.float32),
    (LogNormal(80.0, 60.0), torch.float32),
    (LogNormal(-80.0, 600.0), torch.float64),
    (Normal(float("nan"), 1.0), torch.bfloat16),
    (Normal(0.0, float("inf")), torch.float32),
    (Uniform(5.0, 5.0), torch.float64),
    (Uniform(1.0, 1.0 + 2.0**-20), torch.float32),
    (Uniform(255.0, 256.0), torch.bfloat16),
    (RandInt(-(2**63), 2**63 - 1), torch.int64),
    (RandInt(-(2**62), 2**63 - 1), torch.int64),
    (RandInt(0, 2**62), torch.int64),
    (RandInt(-7, 2**33 + 1), torch.int64),
    (RandInt(-(2**63), None), torch.int64),
    (RandInt(0, 2**28), torch.float32),
    (RandInt(0, 2**12), torch.float16),
    (RandInt(0, 2**60), torch.float64),
    (RandInt(-5, None), torch.int16),
    (RandInt(3, None), torch.float16),
]


def philox(key, counter):
    """Philox4x32-10 of one counter, as its authors describe it, in integers of any size."""
    c = [counter >> 32 * i & 0xFFFFFFFF for i in range(4)]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        upper = second >> 32 ^ c[1] ^ k[0], first >> 32 ^ c[3] ^ k[1]
        c = [upper[0], second & 0xFFFFFFFF, upper[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


# The known answers of Random123 (kat_vectors, "philox4x32 10"): counter, key, words.
ANSWERS = [
    (0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (2**128 - 1, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (0x0370734413198A2E85A308D3243F6A88, 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def edges():
    """32-bit words: ends, powers of two and their neighbours, and many random ones; 2 * 2 * n."""
    powers = [2**k + d for k in range(33) for d in (-2, -1, 0, 1)]
    chosen = [word for word in powers if 0 <= word < 2**32]
    rest = np.random.default_rng(0).integers(0, 2**32, 4096 - len(chosen))
    words = np.concatenate([np.array(chosen), rest]).astype(np.uint32)
    # Every edge in either place of a pair.
    return np.stack([words, np.roll(words, 1)]).reshape(2, 2, -1)


def as_signed(key):
    """The key as the int64 of the same bits, as torch and the kernel have it."""
    return torch.full((1,), key - (1 << 64) if key >> 63 else key)


def same(first, second):
    """Whether two tensors have the same bytes, signs of zeros included; any NaN is NaN."""
    assert first.shape == second.shape
    nan = first.isnan()
    values = [
        torch.where(nan, 0, each).reshape(-1).clone(memory_format=torch.contiguous_format)
        for each in (first, second)
    ]
    numbers = [each.as_strided((each.numel(),), (1,)).view(torch.uint8) for each in values]
    return torch.equal(nan, second.isnan()) and torch.equal(*numbers)
