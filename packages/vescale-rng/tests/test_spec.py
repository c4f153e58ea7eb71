"""SPEC.md names everything that draws, and its table of words is what the installed torch takes."""

import re
from pathlib import Path

import pytest
import torch
import vescale_rng
from vescale_rng import (
    Bernoulli,
    Cauchy,
    Distribution,
    DistributionError,
    Exponential,
    Geometric,
    LogNormal,
    Normal,
    RandInt,
    Random,
    Uniform,
)
from vescale_rng.streams import BernoulliOf, Multinomial, RandPerm, draws

SPEC = (Path(__file__).parent.parent / "SPEC.md").read_text()
ROWS = {
    "`Uniform`": (Uniform(), 100),
    "`Normal`, 16 and more, contiguous": (Normal(), 100),
    "`Normal`, else": (Normal(), 15),
    "`LogNormal`": (LogNormal(), 100),
    "`Bernoulli`": (Bernoulli(0.5), 100),
    "`Exponential`": (Exponential(), 100),
    "`Cauchy`": (Cauchy(), 100),
    "`Geometric`": (Geometric(0.5), 100),
    "`Random`": (Random(), 100),
    "`RandInt`, range below 2**28": (RandInt(0, 2), 100),
    "`RandInt`, else": (RandInt(0, 2**30), 100),
}
PAIRS = {100: 200, 15: 32}


def table():
    lines = [line.strip("| ").split("|") for line in SPEC.splitlines() if line.startswith("|")]
    start = next(i for i, line in enumerate(lines) if line[0].strip() == "op" and len(line) > 5)
    dtypes = [getattr(torch, name.strip()) for name in lines[start][1:]]
    for line in lines[start + 2 :]:
        cells = [cell.strip() for cell in line]
        yield cells[0], dict(zip(dtypes, cells[1:] + [""] * 9, strict=False))


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the table is of another torch: 2.13"
)
def test_the_table_is_what_torch_takes():
    rows = dict(table())
    assert set(rows) == set(ROWS)
    for name, (distribution, numel) in ROWS.items():
        for dtype, cell in rows[name].items():
            if not cell:
                # Nothing to draw, or a range that the dtype does not hold.
                if distribution != RandInt(0, 2**30) or not dtype.is_floating_point:
                    with pytest.raises(DistributionError):
                        draws(distribution, (numel,), dtype)
                continue
            wide = 2 if dtype == torch.float64 else 1
            whole = 112 if dtype in (torch.bfloat16, torch.float16) else 116
            expected = {"pairs": PAIRS[numel], "16": whole * wide}.get(cell)
            if expected is None:
                expected = int(cell) * numel
            assert draws(distribution, (numel,), dtype) == expected, (name, dtype)


def test_the_sentences_about_other_ops():
    assert draws(BernoulliOf(), (10,), torch.bfloat16) == 10
    assert draws(BernoulliOf(torch.float64), (10,), torch.float32) == 20
    assert draws(Multinomial(2, True), (10, 5), torch.float32) == 40
    assert draws(Multinomial(2), (10, 5), torch.float32) == draws(Exponential(), (10, 5))
    assert draws(RandPerm(), (10,), torch.int64) == 9


def test_everything_that_draws_is_named():
    names = [kind.__name__ for kind in Distribution.__subclasses__() if kind.__module__]
    public = [name for name in names if hasattr(vescale_rng, name)]
    others = "dropout feature_dropout native_dropout bernoulli_ trunc_normal_ randperm multinomial"
    for name in [*public, *others.split(), "gumbel_like", "poisson", "binomial", "rrelu"]:
        assert re.search(rf"\b{name}\b", SPEC), name
