"""Writes portable.json, the published test vectors of the portable policy.

`python packages/vescale-rng/vectors/generate.py`; a test checks that the file is up to date. What
the vectors are of is in SPEC.md; a reader of them in forty lines is in
`tests/portable/test_portable_vectors.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vescale_rng import (
    Bernoulli,
    Box,
    Cauchy,
    Distribution,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Random,
    ShardLayout,
    Uniform,
    _portable,
)
from vescale_rng._cpu.rejection import Bounds
from vescale_rng._cpu.stream_ops import Multinomial
from vescale_rng._portable.numpy_arrays import NumpyArrays

FILE = Path(__file__).with_name("portable.json")
KEYS = (0, 0x8C7F0AAC97C4AA2F)
# Beginnings: a block, within one, and where the counter's second word counts.
STARTS = (0, 5, (1 << 34) + 3)
COUNT = 6
ABOUT = (
    "key, counter, words and bits are hexadecimal, the most significant digit first. bits are "
    "those of the elements start, start + 1, ... of a tensor of one dim: of IEEE 754 floats, of "
    "two's complement integers, 0 and 1 for bool."
)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DRAWN: tuple[tuple[Distribution, Sequence[torch.dtype]], ...] = (
    (Uniform(), FLOATS),
    (Uniform(-2.0, 3.5), FLOATS),
    (Normal(), FLOATS),
    (Normal(1.0, 0.02), FLOATS),
    (LogNormal(1.0, 2.0), FLOATS),
    (Exponential(1.5), FLOATS),
    (Cauchy(1.0, 3.0), FLOATS),
    (Geometric(0.25), (*FLOATS, torch.int64)),
    (Bernoulli(0.3), (torch.float32, torch.float64, torch.bool)),
    (RandInt(-3, 9), (torch.int64, torch.int16, torch.float32)),
    (RandInt(-5, 2**40), (torch.int64,)),
    (RandInt(-(2**63), 2**63 - 1), (torch.int64,)),
    (Random(), (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)),
)


def text() -> str:
    """The whole file."""
    document = {
        "about": ABOUT,
        "keys": [_key_of(seed) for seed in (0, 1, 2**32 - 1)],
        "philox": list(_philox()),
        "distributions": list(_distributions()),
        "truncated normals": list(_truncated()),
        "permutations": [_permutation(key, n) for key in KEYS for n in (1, 10)],
        "samples": list(_samples()),
    }
    lines = [f" {json.dumps(name)}: {_rows(value)}" for name, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rows(value: Any) -> str:
    """A list of one row a line, so that a change of the file shows what has changed."""
    if isinstance(value, str):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"


def _key_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    key = _portable.draw_key(generator, torch.device("cpu"))
    return {"seed of mt19937": seed, "key": f"{key:016x}"}


def _philox() -> Iterator[dict[str, Any]]:
    arrays = NumpyArrays()
    for key in KEYS:
        for block, stream in ((0, 0), (1, 0), (2**32, 0), (7, 3), (2**64 - 1, 2**64 - 1)):
            words = arrays.words(key, np.array([block], np.uint64).view(np.int64), stream)
            yield {
                "key": f"{key:016x}",
                "counter": f"{stream << 64 | block:032x}",
                "words": [f"{word:08x}" for word in arrays.in_order(words)[0]],
            }


def _distributions() -> Iterator[dict[str, Any]]:
    for distribution, dtypes in DRAWN:
        for dtype in dtypes:
            for key, start in zip((KEYS[1], *KEYS), STARTS, strict=True):
                local = torch.empty(COUNT, dtype=dtype)
                _portable.fill_portable(local, distribution, _layout(start), key)
                yield _case(type(distribution).__name__, asdict(distribution), local, key, start)


def _truncated() -> Iterator[dict[str, Any]]:
    for bounds in (Bounds(0.0, 1.0, -1.0, 1.0), Bounds(0.0, 1.0, 1.5, 3.0)):
        for dtype in FLOATS:
            local = torch.empty(COUNT, dtype=dtype)
            _portable.truncated_normal(local, bounds, _layout(STARTS[1]), KEYS[1])
            parameters = dict(zip(("mean", "std", "a", "b"), bounds, strict=True))
            yield _case("trunc_normal_", parameters, local, KEYS[1], STARTS[1])


def _permutation(key: int, n: int) -> dict[str, Any]:
    places = _portable.permutation(n, key, torch.device("cpu"))
    return {"key": f"{key:016x}", "n": n, "permutation": places.tolist()}


def _samples() -> Iterator[dict[str, Any]]:
    weights = torch.tensor([[1.0, 2.0, 3.0, 0.5], [0.0, 4.0, 1.0, 1.0]])
    layout = replace(_layout(0), global_shape=(2, 4), boxes=(Box((0, 0), (2, 4), 0, (4, 1)),))
    for replacement in (True, False):
        won = _portable.winners(weights, Multinomial(3, replacement), layout, KEYS[1])
        yield {
            "key": f"{KEYS[1]:016x}",
            "weights": weights.tolist(),
            "replacement": replacement,
            "samples": won.tolist(),
        }


def _layout(start: int) -> ShardLayout:
    return ShardLayout((start + COUNT,), (Box((start,), (COUNT,), 0, (1,)),))


def _case(
    name: str, parameters: dict[str, Any], local: torch.Tensor, key: int, start: int
) -> dict[str, Any]:
    return {
        "distribution": name,
        "parameters": parameters,
        "dtype": str(local.dtype).removeprefix("torch."),
        "key": f"{key:016x}",
        "start": start,
        "bits": [_bits(value) for value in local],
    }


def _bits(value: torch.Tensor) -> str:
    size = value.element_size()
    number = int.from_bytes(value.reshape(1).view(torch.uint8).numpy().tobytes(), "little")
    return f"{number:0{2 * size}x}"


if __name__ == "__main__":
    FILE.write_text(text())
    print(f"written: {FILE}")
