"""Every pair of layouts: the right values on all ranks, and no more bytes than have to be sent.

All ranks of a pair run in this process (see `redistribution_simulation`); the same steps in real
processes, with their bytes traced, are in `test_redistribution_processes`.
REDISTRIBUTION.md says what the planner does today.
"""

from __future__ import annotations

import importlib.util
import random
from itertools import product
from pathlib import Path

import pytest
from redistribution_bound import fewest_elements
from redistribution_oracle import Case, check, coordinates, dense, legal, local_tensors
from redistribution_simulation import plans_of, simulate
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard
from vescale_dtensor._layout.placements import REDUCE_OPS
from vescale_dtensor._redistribute import search as _redistribution_roads
from vescale_dtensor._redistribute.search import stages
from vescale_dtensor.placement_types import StridedShard

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
CORE = [R, P, S0, S1]


def every_kind(count):
    units = (2, 0, 1, 1) if count == 4 else (3, 1)
    cuts = [S0, S1, InterleavedShard(0, 2), StridedShard(1, 2)]
    ragged = [RaggedShard((0,), units), RaggedShard((0, 1), units)]
    return [R, *cuts, *ragged, *map(Partial, REDUCE_OPS)]


def pairs(sizes, shape, placements, most=None):
    fit = [p for p in product(placements, repeat=len(sizes)) if legal(p, sizes, shape)]
    found = [pair for pair in product(fit, fit) if has_values(*pair)]
    return random.Random(0).sample(found, most) if most and most < len(found) else found


def has_values(source, target):
    """A norm is never negative, so it cannot stand for terms of another reduction, which may be."""
    owed = {p.reduce_op for p in source if p.is_partial()}
    return "norm2" not in owed | {p.reduce_op for p in target if p.is_partial()} or owed <= {
        "norm2"
    }


def judge(sizes, shape, placements, most=None):
    at = coordinates(sizes)
    values = {False: dense(shape), True: 625 * dense(shape).abs()}
    for source, target in pairs(sizes, shape, placements, most):
        x = values[any(p.is_partial("norm2") for p in (*source, *target))]
        case = Case(sizes, shape, source, target)
        check(case, simulate(case, plans_of(case, at), local_tensors(x, source, sizes)), x)


@pytest.mark.parametrize("shape", [(8, 8), (4, 3), (1, 2), (0, 4)])
def test_every_pair_on_one_axis(shape):
    judge((4,), shape, every_kind(4))


@pytest.mark.parametrize("shape", [(8, 8), (5, 3), (1, 2), (0, 4)])
def test_every_pair_of_the_usual_ones_on_two_axes(shape):
    judge((2, 2), shape, CORE)


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (4, 1)])
def test_a_sample_of_every_kind_on_two_axes(shape):
    judge((2, 2), shape, every_kind(2), 600)


@pytest.mark.parametrize("shape", [(8, 8), (5, 3), (0, 4)])
def test_a_sample_on_three_axes(shape):
    judge((2, 2, 2), shape, CORE, 40)
    judge((2, 2, 2), shape, every_kind(2), 40)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (0, 4)])
def test_every_pair_of_every_kind_on_two_axes(shape):
    judge((2, 2), shape, every_kind(2))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 8), (5, 3), (0, 4)])
def test_every_pair_of_the_usual_ones_on_three_axes(shape):
    judge((2, 2, 2), shape, CORE)


# --- bytes ---------------------------------------------------------------------------------------


def ratio(case):
    """Bytes that are sent, over those that any schedule has to send."""
    plans = plans_of(case, coordinates(case.sizes))
    sent = sum(step.wire_bytes for steps in plans.values() for step in steps)
    least = 8 * fewest_elements(case.source, case.target, case.sizes, case.shape)
    assert sent >= least, f"{case}: {sent} is less than {least}, so the bound is none"
    return sent / least if least else 1.0 + sent


@pytest.mark.parametrize("shape", [(8, 8), (4, 3), (1, 2)])
def test_no_pair_on_one_axis_sends_more_than_it_has_to(shape):
    for pair in pairs((4,), shape, every_kind(4)):
        assert ratio(Case((4,), shape, *pair)) == 1.0


def test_no_usual_pair_on_two_axes_sends_more_than_it_has_to():
    for pair in pairs((2, 2), (8, 8), CORE):
        assert ratio(Case((2, 2), (8, 8), *pair)) == 1.0


def test_hardly_a_pair_on_three_axes_sends_more_than_it_has_to():
    found = sorted(
        ratio(Case((2, 2, 2), (8, 8), *pair)) for pair in pairs((2, 2, 2), (8, 8), CORE, 200)
    )
    assert found[int(len(found) * 0.9)] == 1.0


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 8, 8), (2, 4, 8, 2)])
def test_the_search_for_a_path_is_bounded(sizes, monkeypatch):
    """However many axes and pairs of placements there are, few paths are looked at closely."""
    asked = {"_least": 0, "_path": 0}

    def counted(name):
        original = getattr(_redistribution_roads._Search, name)

        def call(*args):
            asked[name] += 1
            return original(*args)

        return call

    for name in asked:
        monkeypatch.setattr(_redistribution_roads._Search, name, counted(name))
    chosen = random.Random(1)
    for _ in range(60):
        source, target = (tuple(chosen.choices(CORE, k=len(sizes))) for _ in range(2))
        asked.update(_least=0, _path=0)
        stages.__wrapped__(source, target, sizes, (True, True))
        assert asked["_least"] <= 2000
        assert 1 <= asked["_path"] <= 50


SCRIPT = Path(__file__).parents[2] / "benchmarks" / "redistribution_table.py"


def test_the_table_is_up_to_date():
    spec = importlib.util.spec_from_file_location("redistribution_table", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = script.FILE.read_text(encoding="utf-8")
    assert written == script.text(), "run: python benchmarks/redistribution_table.py"
